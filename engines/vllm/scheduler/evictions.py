"""Hearing of it when vLLM's block pool gives a block away.

The pool calls its `metrics_collector` (vllm/v1/core/block_pool.py); more than one part of picbench
wants to know, and what vLLM itself put there stays in place.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from picbench.engines.chunk_cache.resident_chunks import ResidentChunks
from picbench.engines.planning.keys import is_canonical
from picbench.engines.vllm.scheduler.pool import Pool, key_of


class EvictionListener(Protocol):
    """Who wants to know."""

    def on_block_evicted(self, block: Any) -> None:
        """A block is handed out or forgotten; its key is still set."""

    def reset(self) -> None:
        """All keys were dropped."""


@dataclass(frozen=True, slots=True)
class EvictionCollector:
    """What vLLM's block pool calls. `stock` is vLLM's own collector, which hears all there is.

    A prompt of 32k tokens hits two thousand blocks: nobody else is told of hits.
    """

    stock: Any
    listeners: list[EvictionListener]

    def on_block_evicted(self, block: Any) -> None:
        """Tell everybody."""
        if self.stock is not None:
            self.stock.on_block_evicted(block)
        for listener in self.listeners:
            listener.on_block_evicted(block)

    def on_block_allocated(self, block: Any) -> None:
        """Tell vLLM's collector."""
        if self.stock is not None:
            self.stock.on_block_allocated(block)

    def on_block_accessed(self, block: Any) -> None:
        """Tell vLLM's collector."""
        if self.stock is not None:
            self.stock.on_block_accessed(block)

    def reset(self) -> None:
        """Tell everybody."""
        if self.stock is not None:
            self.stock.reset()
        for listener in self.listeners:
            listener.reset()


@dataclass(frozen=True, slots=True)
class ChunkEvictions:
    """Tells the coordinator which pages the pool gives away."""

    chunks: ResidentChunks
    pool: Pool

    def on_block_evicted(self, block: Any) -> None:
        """Let the page's chunks go, unless another block holds the same page."""
        key = key_of(block)
        if key is not None and is_canonical(key) and self.pool.last(block):
            self.chunks.evicted(key)

    def reset(self) -> None:
        """The pool was emptied."""
        self.chunks.reset()


def listen(block_pool: Any, listener: EvictionListener) -> None:
    """Add a listener to a block pool."""
    collector = block_pool.metrics_collector
    if not isinstance(collector, EvictionCollector):
        collector = block_pool.metrics_collector = EvictionCollector(collector, [])
    collector.listeners.append(listener)
