"""Hearing of it when vLLM's block pool gives a block away.

The pool calls its `metrics_collector` (vllm/v1/core/block_pool.py); more than one part of picbench
wants to know, and what vLLM itself put there stays in place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from picbench.engines.chunk_cache.coordinator import Coordinator
from picbench.engines.keys import is_canonical
from picbench.engines.vllm.pool import Pool, key_of


class Collector(Protocol):
    """What vLLM's block pool calls."""

    def on_block_evicted(self, block: Any) -> None:
        """A block is handed out or forgotten; its key is still set."""

    def on_block_allocated(self, block: Any) -> None:
        """A block was handed out."""

    def on_block_accessed(self, block: Any) -> None:
        """A cached block was hit."""

    def reset(self) -> None:
        """All keys were dropped."""


@dataclass(frozen=True, slots=True)
class Collectors:
    """Several collectors as one."""

    parts: Sequence[Collector]

    def on_block_evicted(self, block: Any) -> None:
        """Tell all parts."""
        for part in self.parts:
            part.on_block_evicted(block)

    def on_block_allocated(self, block: Any) -> None:
        """Tell all parts."""
        for part in self.parts:
            part.on_block_allocated(block)

    def on_block_accessed(self, block: Any) -> None:
        """Tell all parts."""
        for part in self.parts:
            part.on_block_accessed(block)

    def reset(self) -> None:
        """Tell all parts."""
        for part in self.parts:
            part.reset()


@dataclass(frozen=True, slots=True)
class Evictions:
    """Tells the coordinator which pages the pool gives away."""

    chunks: Coordinator
    pool: Pool

    def on_block_evicted(self, block: Any) -> None:
        """Let the page's chunks go, unless another block holds the same page."""
        key = key_of(block)
        if key is not None and is_canonical(key) and self.pool.last(block):
            self.chunks.evicted(key)

    def on_block_allocated(self, block: Any) -> None:
        """Nothing to do."""

    def on_block_accessed(self, block: Any) -> None:
        """Nothing to do."""

    def reset(self) -> None:
        """The pool was emptied."""
        self.chunks.reset()


def listen(block_pool: Any, collector: Collector) -> None:
    """Add a collector to a block pool."""
    before = block_pool.metrics_collector
    block_pool.metrics_collector = Collectors([*([before] if before else []), collector])
