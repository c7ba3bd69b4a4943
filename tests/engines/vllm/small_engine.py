"""Settings of the engines that tests start, and what is left of their requests."""

from pathlib import Path
from typing import Any

from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine

#: Texts of anchors: these models have no tokenizer.
ANCHORS = {"passage": tuple(range(100, 137)), "./other.txt": tuple(range(200, 209))}


def small_config(model: Path | str, kv_blocks: int, context: int, **more: Any) -> EngineConfig:
    """A small engine in float32."""
    sizes = {"kv_blocks": kv_blocks, "context": context, "anchors": ANCHORS}
    return EngineConfig(model=str(model), dtype="float32", **sizes | more)


def check_drained(engine: Engine) -> None:
    """Nothing is left of any request."""
    scheduler = engine._running.scheduler
    assert scheduler.linker.idle
    assert not scheduler.requests
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == engine._running.pool
