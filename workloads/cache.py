"""Where picbench keeps what it makes once: built models, generated rows."""

import os
from pathlib import Path


def cache_directory(kind: str) -> Path:
    """The user's cache for one kind of thing: ``$XDG_CACHE_HOME/picbench/KIND``, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "picbench" / kind
