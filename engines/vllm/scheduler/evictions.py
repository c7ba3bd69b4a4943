"""Eviction listeners of vLLM's block pool.

The pool calls its one `metrics_collector` (vllm/v1/core/block_pool.py); this collector passes the
calls on to several listeners, and to vLLM's own collector if there was one.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

from picbench.engines.chunk_cache.chunk_store import ChunkStore
from picbench.engines.planning.keys import is_canonical
from picbench.engines.vllm.faults import Faults
from picbench.engines.vllm.scheduler.pool import Pool, key_of


class EvictionListener(Protocol):
    """Is notified of evictions."""

    def on_block_evicted(self, block: Any) -> None:
        """A block is reused or forgotten; its key is still set."""

    def reset(self) -> None:
        """All keys were dropped."""


@dataclass(frozen=True, slots=True)
class EvictionCollector:
    """The collector of a block pool; `stock` is vLLM's own, one of the listeners.

    The other listeners are not told of hits: a prompt of 32k tokens has two thousand of them.
    """

    stock: Any
    listeners: list[EvictionListener]

    def on_block_evicted(self, block: Any) -> None:
        """Notify all listeners."""
        for listener in self.listeners:
            listener.on_block_evicted(block)

    def on_block_allocated(self, block: Any) -> None:
        """Notify the stock collector."""
        if self.stock is not None:
            self.stock.on_block_allocated(block)

    def on_block_accessed(self, block: Any) -> None:
        """Notify the stock collector."""
        if self.stock is not None:
            self.stock.on_block_accessed(block)

    def reset(self) -> None:
        """Notify all listeners."""
        for listener in self.listeners:
            listener.reset()


@dataclass(frozen=True, slots=True)
class ChunkEvictions:
    """Tells the chunk store which pages the pool evicts."""

    store: ChunkStore
    pool: Pool
    faults: Faults = field(default_factory=Faults)

    def on_block_evicted(self, block: Any) -> None:
        """Evict the page's chunks, unless another block holds the same page.

        vLLM calls this in the middle of an allocation, which must not be left half done.
        """
        key = key_of(block)
        if key is not None and is_canonical(key) and self.pool.is_last(block):
            self.faults.succeeds("evict a chunk", None, lambda: self.store.evict(key))

    def reset(self) -> None:
        """The pool was emptied."""
        self.store.reset_pool()


def listen(block_pool: Any, listener: EvictionListener) -> None:
    """Add a listener to a block pool."""
    collector = block_pool.metrics_collector
    if not isinstance(collector, EvictionCollector):
        listeners = [] if collector is None else [collector]
        collector = block_pool.metrics_collector = EvictionCollector(collector, listeners)
    collector.listeners.append(listener)
