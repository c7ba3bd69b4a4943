"""Models by their names on the hub, found before anything is measured."""

from dataclasses import dataclass
from pathlib import Path

from picbench.errors import ConfigError
from picbench.workloads import models
from picbench.workloads.models.extras import engine_packages

_CONFIG = "config.json"
_ELSEWHERE = "`models` takes OWNER/NAME on the hub, a folder with its files, or testbed"


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model: what files and tables call it, what an engine loads, how many tokens it can take.

    `positions` is None where its configuration does not say so, or was not read.
    """

    name: str
    spec: str
    positions: int | None = None

    @property
    def trained_here(self) -> bool:
        """Whether it is a testbed, whose rows are the bundled ones."""
        return self.name.partition(":")[0] == "testbed"


def name_of(spec: str) -> str:
    """What files and tables call a model: its name on the hub, or that of its folder.

    A relative folder OWNER/NAME has its name on the hub.
    """
    path = Path(spec).expanduser()
    if not path.is_dir() or (not path.is_absolute() and len(path.parts) == 2):
        return spec
    return path.resolve().name


def find_model(spec: str) -> NamedModel:
    """The model called `spec`, whose files are here or can be fetched.

    Raises ConfigError, which says what to do, where they cannot.
    """
    found = models.resolve(spec)
    positions = found.context
    if isinstance(found.path, str):
        _check_hub(found.path)
        positions = _positions(found.path)
    return NamedModel(name_of(spec), spec, positions)


def _positions(repository: str) -> int | None:
    with engine_packages():
        from transformers import AutoConfig
    try:
        config = AutoConfig.from_pretrained(repository)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"`models` {repository}: {reason}", hint=_ELSEWHERE) from error
    return getattr(config, "max_position_embeddings", None)


def _check_hub(repository: str) -> None:
    """One request where the libraries that load files would try again for half a minute."""
    from huggingface_hub import (
        get_hf_file_metadata,
        hf_hub_url,
        is_offline_mode,
        try_to_load_from_cache,
    )
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(try_to_load_from_cache(repository, _CONFIG), str):
        return
    if is_offline_mode():
        raise _absent(repository, "HF_HUB_OFFLINE forbids to fetch it")
    try:
        get_hf_file_metadata(hf_hub_url(repository, _CONFIG))
    except GatedRepoError as error:
        raise ConfigError(
            f"`models` {repository}: the hub asks for a token of a user who accepted its terms",
            hint="accept them on the model's page, then HF_TOKEN=... or hf auth login",
        ) from error
    except RepositoryNotFoundError as error:
        raise _absent(repository, "the hub has no such model, or shows it to others") from error
    # Also errors of the HTTP library under huggingface_hub, which differs between releases.
    except Exception as error:
        raise _absent(repository, "the hub cannot be reached") from error


def _absent(repository: str, why: str) -> ConfigError:
    return ConfigError(
        f"`models` {repository}: not in the hub's cache on this machine, and {why}",
        hint=_ELSEWHERE,
    )
