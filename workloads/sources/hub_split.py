"""Splits of data sets on the Hugging Face hub, at one commit, by way of `datasets`."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from picbench.errors import ConfigError, DataError, PicBenchError, closest
from picbench.workloads.sources.hub import Origin
from picbench.workloads.sources.records import Record

_PREFIX = "hf:"
_KIND = "dataset"
_FORM = re.compile(r"hf:([^/@:]+/[^/@:]+)(?:@([^:]+))?(?::(?:([^/:]+)/)?([^/:]+))?")
_SHAPE = "hf:OWNER/NAME[@REVISION][:[CONFIG/]SPLIT]"
_OFFLINE = "`offline` or HF_HUB_OFFLINE forbids to fetch it"
_FETCH = "run once with a network and without `limit`, which fetches all of it"


@dataclass(frozen=True, slots=True)
class HubSplit:
    """A split that a user named; None where the data set has only one to choose from.

    `revision` is a commit, a branch or a tag; `config` is a subset, as the hub calls it.
    """

    repository: str
    revision: str = "main"
    config: str | None = None
    split: str | None = None


@dataclass(frozen=True, slots=True)
class OpenedSplit:
    """The rows of a split, read as they are needed, and where they are from."""

    name: str
    rows: Iterable[Mapping[str, Any]]
    origin: Origin

    def records(self) -> Iterator[Record]:
        """The rows in order; DataError where they cannot be read."""
        try:
            for number, row in enumerate(self.rows, start=1):
                yield Record(f"{self.name} row {number}", row)
        except DataError:
            raise
        # Also errors of Arrow and of the HTTP library under huggingface_hub.
        except Exception as error:
            raise DataError(f"`data={self.name}`: {_line(error)}", hint=_FETCH) from error


def is_split(data: str) -> bool:
    """Whether `data` names a data set on the hub by its own columns."""
    return data.startswith(_PREFIX)


def parse_split(data: str) -> HubSplit:
    """Read ``hf:OWNER/NAME[@REVISION][:[CONFIG/]SPLIT]``; ConfigError for another form."""
    found = _FORM.fullmatch(data)
    if found is None:
        raise ConfigError(f"`data` {data}: no such form", hint=_SHAPE)
    repository, revision, config, split = found.groups()
    return HubSplit(repository, revision or "main", config, split)


def open_split(wanted: HubSplit, *, offline: bool, stream: bool) -> OpenedSplit:
    """Open a split at the commit that its revision is now.

    With `stream` rows come over the network as they are read, and nothing is kept; else the
    repository at that commit is fetched into the hub's cache first, once. `offline`, or the
    variable HF_HUB_OFFLINE, takes it from there. Raises ConfigError, which says what there is,
    where the repository, the revision, the subset or the split is not there.
    """
    from huggingface_hub import is_offline_mode

    local = offline or is_offline_mode()
    try:
        streamed = _remote(wanted) if stream and not local else None
        place, commit = streamed or _snapshot(wanted, local)
        return _open(wanted, place, commit, remote=streamed is not None)
    except PicBenchError:
        raise
    # Errors of huggingface_hub, of `datasets` and of the HTTP library under both.
    except Exception as error:
        raise _refused(wanted, error, local) from error


def _remote(wanted: HubSplit) -> tuple[str, str] | None:
    """(repository, commit); None where only a snapshot can be read.

    `datasets` refuses repositories that have a loading script, even if they have the data, too.
    """
    from huggingface_hub import HfApi

    found = HfApi().dataset_info(wanted.repository, revision=wanted.revision)
    script = f"{wanted.repository.partition('/')[2]}.py"
    if any(file.rfilename == script for file in found.siblings or ()):
        return None
    return wanted.repository, str(found.sha)


def _snapshot(wanted: HubSplit, local: bool) -> tuple[str, str]:
    """(folder, commit) in the hub's cache, where a folder is named by its commit."""
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        wanted.repository, repo_type=_KIND, revision=wanted.revision, local_files_only=local
    )
    return folder, Path(folder).name


def _open(wanted: HubSplit, place: str, commit: str, *, remote: bool) -> OpenedSplit:
    from datasets import get_dataset_config_names, load_dataset_builder
    from datasets.utils import logging

    logging.set_verbosity(logging.CRITICAL)  # Errors are raised as well.
    revision = {"revision": commit} if remote else {}
    configs = get_dataset_config_names(place, **revision)
    config = _choose(wanted, "subset", wanted.config, configs, default="default")
    builder = load_dataset_builder(place, config, **revision)
    splits = list(map(str, builder.config.data_files))
    split = _choose(wanted, "split", wanted.split, splits)
    name = f"{_PREFIX}{wanted.repository}@{commit[:12]}:{config}/{split}"
    origin = Origin(wanted.repository, commit, f"{config}/{split}", None, wanted.revision == commit)
    return OpenedSplit(name, builder.as_streaming_dataset(split=split), origin)


def _choose(
    wanted: HubSplit, kind: str, name: str | None, there: Sequence[str], default: str = ""
) -> str:
    """The name, or the only one there is, or `default`; ConfigError names those there are."""
    known = ", ".join(there)
    if name is None and (len(there) == 1 or default in there):
        return default if default in there else there[0]
    if name is None:
        problem, hint = f"which {kind}?", _SHAPE
    elif name in there:
        return name
    else:
        problem, hint = f"no {kind} {name!r};", closest(name, there)
    raise ConfigError(f"`data=hf:{wanted.repository}`: {problem} there are: {known}", hint=hint)


def _refused(wanted: HubSplit, error: Exception, local: bool) -> ConfigError:
    """What to say of an error; it names the revisions there are where one is missing."""
    from huggingface_hub.errors import (
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hint = _FETCH
    if isinstance(error, RevisionNotFoundError):
        known = _known(lambda: _revisions(wanted.repository))
        problem, hint = f"no revision {wanted.revision!r}{known}", "@REVISION"
    elif isinstance(error, RepositoryNotFoundError):
        problem = "no such data set on the hub, or it needs a login"
        hint = "`data=hf:OWNER/NAME`"
    elif isinstance(error, LocalEntryNotFoundError):
        why = _OFFLINE if local else "the hub cannot be reached"
        known = _known(lambda: _cached(wanted.repository))
        lacks = f"is not in the hub's cache on this machine{known}, and {why}"
        problem = f"revision {wanted.revision!r} {lacks}"
    else:
        problem = _line(error)
    return ConfigError(f"`data=hf:{wanted.repository}`: {problem}", hint=hint)


def _known(look: Callable[[], list[str]]) -> str:
    try:
        found = look()
    except Exception:  # Whatever the first error was is said in any case.
        return ""
    return f"; there are: {', '.join(found)}" if found else ""


def _revisions(repository: str) -> list[str]:
    from huggingface_hub import HfApi

    refs = HfApi().list_repo_refs(repository, repo_type=_KIND)
    return [ref.name for ref in (*refs.branches, *refs.tags)]


def _cached(repository: str) -> list[str]:
    """Branches, tags and commits of a data set in the hub's cache."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"{_KIND}s--{repository.replace('/', '--')}"
    refs = sorted(path.name for path in (folder / "refs").rglob("*") if path.is_file())
    commits = sorted(path.name[:12] for path in (folder / "snapshots").glob("*"))
    return [*refs, *commits]


def _line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]
