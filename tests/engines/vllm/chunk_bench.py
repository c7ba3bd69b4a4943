"""A small engine over four chunks, for the tests of the chunk cache."""

from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from picbench.engines.chunk_cache.tiers.guarded_tier import GuardedTier
from picbench.engines.chunk_cache.tiers.stack import TierStack
from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import Request, Result
from picbench.engines.vllm.transfer.chunk_transfers import ChunkTransfers

BLOCKS = 400


def config(llama: Path, **changes: Any) -> EngineConfig:
    return EngineConfig(
        **{
            "model": str(llama),
            "dtype": "float32",
            "kv_blocks": BLOCKS,
            "context": 1024,
            "batch_tokens": 256,
            "max_requests": 8,
            **changes,
        }
    )


def serve(engine: Engine, *requests: Request) -> list[Result]:
    return engine.generate(requests, max_tokens=4, logprobs=4, ignore_eos=True)


@contextmanager
def using_tiers(engine: Engine, *tiers: Any, deadline: float = 30.0) -> Iterator[None]:
    """Let an engine use other tiers, and ask them as if others stored in them, too."""
    tier_client = engine._running.engine.model_executor.driver_worker.worker.tier_client
    store = engine._running.scheduler.chunk_store
    shared = store.shared_tiers
    stack = TierStack([GuardedTier(tier, deadline=deadline) for tier in tiers])
    row = tier_client._pool.row_bytes
    with closing(ChunkTransfers(tier_client._copies, stack, row, 0, nullcontext)) as others:
        tier_client._chunks, before = others, tier_client._chunks
        store.shared_tiers = True
        try:
            yield
            engine.drain()
        finally:
            tier_client._chunks, store.shared_tiers = before, shared
