"""Model folders of the tuned variants, put together from the model and a delta."""

import hashlib
import shutil
import tempfile
from pathlib import Path

from tokenizers import Tokenizer

from picbench.errors import ConfigError
from picbench.workloads.sources.cache_files import cache_directory
from picbench.workloads.testbed.lm.files import WEIGHTS, save_weights, variant_weights

_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def put_together(folder: Path, variant: str, parent: Path | None = None) -> Path:
    """Return a folder with the variant whose delta lies in `folder`, made if it is not there.

    It appears in one step in `parent` (default: the user's cache), named by its contents. Raises
    ConfigError when it cannot be written.
    """
    parent = parent or cache_directory("models")
    target = parent / f"testbed-{variant}-{_fingerprint(folder, variant)}"
    if target.is_dir():
        return target
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parent) as scratch:
            made = Path(scratch) / "model"
            made.mkdir()
            _write(folder, variant, made)
            _publish(made, target)
    except OSError as error:
        raise ConfigError(
            f"cannot write the model 'testbed-{variant}' to {parent}: {error.strerror or error}",
            hint="set XDG_CACHE_HOME to a folder that can be written",
        ) from error
    return target


def _fingerprint(folder: Path, variant: str) -> str:
    digest = hashlib.sha256()
    for name in (WEIGHTS, f"{variant}.delta", *_FILES):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()[:12]


def _write(folder: Path, variant: str, made: Path) -> None:
    for name in _FILES:
        shutil.copyfile(folder / name, made / name)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    save_weights(variant_weights(folder, tokenizer, variant), made)


def _publish(made: Path, target: Path) -> None:
    try:
        made.rename(target)
    except OSError:
        # Another process was faster: what it wrote is the same.
        if not target.is_dir():
            raise
