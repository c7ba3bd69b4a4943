"""Measures that fail, in a module that an arm's process can import."""

import os
from typing import Any


def gone(engine: Any, name: str) -> dict[str, float]:
    """End the engine's process."""
    os._exit(9)


def wrong(engine: Any, name: str) -> dict[str, float]:
    """Raise what is no error of picbench."""
    raise ValueError(f"not {name}")
