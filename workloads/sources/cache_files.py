"""Where picbench keeps what it makes once: built models, generated and unpacked rows."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from picbench.errors import ConfigError
from picbench.files import write_whole


def cache_directory(kind: str) -> Path:
    """The user's cache for one kind of thing: ``$XDG_CACHE_HOME/picbench/KIND``, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "picbench" / kind


def write_rows(name: str, rows: Iterable[dict[str, Any]], directory: Path | None = None) -> Path:
    """Write rows to ``<name>-<fingerprint>.jsonl`` unless it exists, and return the file.

    It is in `directory` (default: the user's cache) and appears whole or not at all.
    """
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    fingerprint = hashlib.sha256(content).hexdigest()[:16]
    file = (directory or cache_directory("rows")) / f"{name}-{fingerprint}.jsonl"
    if not file.exists():
        write_whole(file, content)
    return file


def write_model(
    name: str, fingerprint: str, write: Callable[[Path], None], directory: Path | None = None
) -> Path:
    """Have `write` fill the folder ``<name>-<fingerprint>`` unless it exists, and return it.

    It is in `directory` (default: the user's cache) and appears in one step, so that concurrent
    or killed runs leave no half-written model. Raises ConfigError when it cannot be written.
    """
    parent = directory or cache_directory("models")
    target = parent / f"{name}-{fingerprint}"
    if target.is_dir():
        return target
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parent, prefix=f".{name}-") as scratch:
            made = Path(scratch) / "model"
            made.mkdir()
            write(made)
            _publish(made, target)
    except OSError as error:
        raise ConfigError(
            f"cannot write the model {name!r} to {parent}: {error.strerror or error}",
            hint="set XDG_CACHE_HOME to a folder that can be written",
        ) from error
    return target


def _publish(made: Path, target: Path) -> None:
    try:
        made.rename(target)
    except OSError:
        # Another process wrote the same folder first.
        if not target.is_dir():
            raise
