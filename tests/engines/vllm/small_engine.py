"""Settings of the engines that tests start."""

from pathlib import Path
from typing import Any

from picbench.engines.config import EngineConfig


def small_config(model: Path | str, kv_blocks: int, context: int, **more: Any) -> EngineConfig:
    """A small engine in float32."""
    sizes = {"kv_blocks": kv_blocks, "context": context}
    return EngineConfig(model=str(model), dtype="float32", **sizes, **more)
