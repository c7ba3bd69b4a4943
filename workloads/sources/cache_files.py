"""Where picbench keeps what it makes once: built models, generated and unpacked rows."""

import os
import tempfile
from pathlib import Path


def cache_directory(kind: str) -> Path:
    """The user's cache for one kind of thing: ``$XDG_CACHE_HOME/picbench/KIND``, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "picbench" / kind


def write_whole(file: Path, content: bytes) -> None:
    """Write a file so that another process sees all of it or nothing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as partial:
        partial.write(content)
    Path(partial.name).replace(file)
