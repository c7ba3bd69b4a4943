"""Models by name: a shape, a folder, or an id on the hub."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast

from picbench.errors import ConfigError, closest
from picbench.workloads.models.shapes import all_shapes, materialise
from picbench.workloads.prompts.tokens import PlainTokenizer, Tokenizer

__all__ = [
    "ModelSpec",
    "describe",
    "engine_packages",
    "has_chat_template",
    "load_tokenizer",
    "plain_tokenizer",
    "reach_model",
    "resolve",
]

Weights = Literal["real", "random", "dummy"]

_PREFIX = "shape:"
_TESTBED = "testbed"
_VARIANTS = {
    "testbed:block": "the same, tuned for chunks that see themselves only: block-attention",
    "testbed:link": "the same, tuned for such chunks with link tokens after them: kvlink",
}
_SMOLLM2 = "smollm2"
_HINT = (
    "`model` takes testbed, testbed:block, testbed:link, smollm2, smollm2:FILE, shape:NAME, a "
    "folder with a config.json, or OWNER/NAME on the hub"
)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model that an engine can load.

    `name` is the user's, `path` a folder or an id on the hub. `weights` are ``real`` (trained),
    ``random`` (files of random numbers) or ``dummy`` (no files: the engine draws them).
    `context` is the longest sequence in tokens, None until it is known. `restates` marks the
    testbed model, whose replies restate the facts that lead to the answer.
    """

    name: str
    path: Path | str
    weights: Weights = "real"
    context: int | None = None
    restates: bool = False

    @property
    def meaningful(self) -> bool:
        """Whether the weights are trained, so that scores mean something."""
        return self.weights == "real"

    @property
    def label(self) -> str:
        """The model's name in tables and plots."""
        if self.restates:
            _, _, variant = self.name.partition(":")
            return f"testbed model, {variant}-tuned" if variant else "testbed model"
        return self.name if self.meaningful else f"{self.name} ({self.weights} weights)"


def describe() -> dict[str, str]:
    """Return one line about each built-in model by name; only `smollm2` is downloaded, once."""
    shaped = {_PREFIX + name: shape.summary for name, shape in all_shapes().items()}
    testbed = {_TESTBED: "trained on picbench's synthetic rows, 4k positions: accuracy"}
    smollm2 = "SmolLM2-135M-Instruct, trained on real text, 8k positions; 93 MB, fetched once"
    return testbed | _VARIANTS | {_SMOLLM2: smollm2} | shaped


def resolve(spec: str, *, weights: bool = True) -> ModelSpec:
    """Find a model by its name; one that picbench makes is written to the cache if it is not there.

    Without `weights` a folder need not have them. Raises ConfigError when there is no such shape or
    folder. An id on the hub is only checked when its files are loaded.
    """
    if spec.startswith(_PREFIX):
        return _shape(spec)
    if spec == _TESTBED or spec.startswith(f"{_TESTBED}:"):
        return _testbed(spec)
    name, colon, file = spec.partition(":")
    if name == _SMOLLM2 and bool(file) == bool(colon):
        from picbench.workloads.models.smollm2 import converted

        return _local(spec, converted(file if colon else None))
    folder = Path(spec).expanduser()
    if folder.is_dir():
        return _local(spec, folder, served=weights)
    if _is_hub_id(spec):
        return ModelSpec(spec, spec)
    raise _error(spec, "no such model", f"{closest(spec, all_shapes(), _PREFIX)}; {_HINT}")


def load_tokenizer(model: ModelSpec) -> Tokenizer:
    """Load a model's tokenizer with `transformers`, or raise ConfigError.

    Without that package a folder's is read by `tokenizers`, which knows no chat templates.
    """
    bare = find_spec("transformers") is None
    if bare and isinstance(model.path, Path) and not has_chat_template(model):
        return PlainTokenizer(model.path / "tokenizer.json")
    with engine_packages():
        from transformers import AutoTokenizer
    try:
        if isinstance(model.path, str):
            reach_model(model.path)
        # The default length would make transformers warn about long prompts.
        found = AutoTokenizer.from_pretrained(str(model.path), model_max_length=sys.maxsize)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(": ")
        raise _error(model.name, f"cannot load its tokenizer: {reason}") from error
    return cast(Tokenizer, found)


def plain_tokenizer(model: ModelSpec) -> Tokenizer:
    """A model's tokenizer for texts alone, with `transformers` only where it needs that."""
    if isinstance(model.path, Path):
        file = model.path / "tokenizer.json"
        return PlainTokenizer(file) if file.exists() else load_tokenizer(model)
    from huggingface_hub import hf_hub_download

    with suppress(OSError, ValueError):  # The error of `load_tokenizer` says more.
        hf_hub_download(model.path, "tokenizer_config.json")
        return PlainTokenizer(Path(hf_hub_download(model.path, "tokenizer.json")))
    return load_tokenizer(model)


def has_chat_template(model: ModelSpec) -> bool:
    """Whether a model brings a chat template; the tokenizer of a folder is not loaded for that."""
    if isinstance(model.path, str):
        return bool(getattr(load_tokenizer(model), "chat_template", None))
    file = model.path / "tokenizer_config.json"
    settings = _config(model.name, file) if file.exists() else {}
    return "chat_template" in settings or any(model.path.glob("chat_template.*"))


@contextmanager
def engine_packages() -> Iterator[None]:
    """Turn a missing package inside the block into a ConfigError that says what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the package {error.name!r} is not installed",
            hint="pip install 'picbench[cpu]' or 'picbench[cuda]'",
        ) from error


def reach_model(repository: str) -> None:
    """ConnectionError at once where a model is neither in the hub's cache nor can be fetched."""
    from huggingface_hub import hf_hub_url, is_offline_mode, try_to_load_from_cache

    from picbench.workloads.sources.hub import reach

    file = "config.json"
    if is_offline_mode() or isinstance(try_to_load_from_cache(repository, file), str):
        return
    try:
        reach(hf_hub_url(repository, file))
    except ConnectionError as error:
        raise ConnectionError(f"it is not in the hub's cache, and {error}") from error


def _shape(spec: str) -> ModelSpec:
    name = spec.removeprefix(_PREFIX)
    if name not in all_shapes():
        raise _error(spec, "no such shape", closest(name, all_shapes(), _PREFIX))
    shape = all_shapes()[name]
    with engine_packages():
        return ModelSpec(spec, materialise(shape), shape.weights, shape.positions)


def _testbed(spec: str) -> ModelSpec:
    from picbench.workloads.testbed import model_path

    folder = model_path()
    if spec != _TESTBED:
        if spec not in _VARIANTS:
            raise _error(spec, "no such variant of the testbed", closest(spec, _VARIANTS))
        with engine_packages():
            from picbench.workloads.testbed.model_files import build_variant

            folder = build_variant(folder, spec.partition(":")[2])
    # Its weights may be missing where only tokens are counted; `check_weights` asks for them.
    return replace(_local(spec, folder, served=False), restates=True)


def check_weights(model: ModelSpec) -> None:
    """Raise ConfigError where the testbed is to be served and its weights are not installed."""
    if model.restates and isinstance(model.path, Path):
        _local(model.name, model.path)


def _local(spec: str, folder: Path, *, served: bool = True) -> ModelSpec:
    file = folder / "config.json"
    config = _config(spec, file) if served or file.exists() else {}
    # Folders that picbench built record that their weights are not trained.
    weights = config.get("picbench_weights", "real")
    patterns = ("*.safetensors", "*.bin", "*.pt")
    if served and weights == "real" and not any(next(folder.glob(p), None) for p in patterns):
        hint = "expected *.safetensors; shape:NAME runs without weights"
        if spec.startswith(_TESTBED):
            hint = "pip install picbench-testbed"
        raise _error(spec, "no weights in that folder", hint)
    return ModelSpec(spec, folder.resolve(), weights, config.get("max_position_embeddings"))


def _config(spec: str, file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except OSError as error:
        raise _error(spec, "no config.json in that folder") from error
    except ValueError as error:
        raise _error(spec, f"{file}: {error}") from error
    if not isinstance(found, dict):
        raise _error(spec, f"{file} is not a JSON object")
    return found


def _error(spec: str, problem: str, hint: str = _HINT) -> ConfigError:
    return ConfigError(f"`model` {spec}: {problem}", hint=hint)


def _is_hub_id(spec: str) -> bool:
    owner, slash, name = spec.partition("/")
    return bool(slash and owner and name) and "/" not in name and owner not in {".", "..", "~"}
