"""The operations on vLLM's block pool that the linker and the chunk cache need."""

from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from picbench.engines.chunk_cache.chunk_store import ChunkStore
from picbench.engines.planning.keys import Key, is_canonical
from picbench.engines.vllm.faults import Faults

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


#: What vLLM appends to a block's hash: the group of layers, the only one (`key_of` takes it off;
#: `make_block_hash_with_group_id` in vllm/v1/core/kv_cache_utils.py).
_GROUP_ID = bytes(4)


class Pool:
    """Lookup, references and eviction order over a `vllm.v1.core.block_pool.BlockPool`."""

    def __init__(self, block_pool: "BlockPool") -> None:
        self._pool = block_pool

    @property
    def usable(self) -> int:
        """Blocks that requests can use; vLLM reserves block 0."""
        return self._pool.num_gpu_blocks - 1

    @property
    def available(self) -> int:
        """Blocks without references: free ones, and idle ones that may be evicted."""
        return self._pool.get_num_free_blocks()

    @property
    def cached(self) -> int:
        """Keys under which blocks can be found, in use or idle."""
        return len(self._pool.cached_block_hash_to_block)

    def resident(self, key: Key) -> bool:
        """Whether a block with this key is in the pool, in use or idle."""
        return self._find(key) is not None

    def in_use(self, key: Key) -> bool:
        """Whether a block with this key is referenced."""
        block = self._find(key)
        return block is not None and block.ref_cnt > 0

    def block_id(self, key: Key) -> int:
        """The id of a resident block; raises KeyError if it is not resident."""
        block = self._find(key)
        if block is None:
            raise KeyError(key)
        return int(block.block_id)

    def find_first(self, keys: Iterable[Key]) -> "list[KVCacheBlock]":
        """The blocks of the first keys, up to the first one that is not resident."""
        found = list["KVCacheBlock"]()
        cached: Any = self._pool.cached_block_hash_to_block._cache
        for key in keys:
            block = cached.get(key + _GROUP_ID)
            if block is None:
                break
            # Of several with one key it is the first, as in `get_cached_block`.
            found.append(next(iter(block.values())) if isinstance(block, dict) else block)
        return found

    def hold(self, key: Key) -> "KVCacheBlock | None":
        """Reference a block, so that it is not evicted; None if it is not resident."""
        block = self._find(key)
        if block is not None:
            self._pool.touch([block])
        return block

    def release(self, blocks: "list[KVCacheBlock]") -> None:
        """Drop references; the last block of the list is evicted first."""
        self._pool.free_blocks(reversed(blocks))

    def refresh(self, keys: Iterable[Key]) -> None:
        """Make idle blocks the last to be evicted, as if they had just been used."""
        idle = [block for block in map(self._find, keys) if block and not block.ref_cnt]
        for block in idle:
            self._pool.free_block_queue.remove(block)
        self._pool.free_block_queue.append_n(idle)

    def discard(self, keys: Iterable[Key]) -> None:
        """Forget the content of idle blocks, and make them the first to be reused."""
        for block in map(self._find, keys):
            # A block that was just popped for an allocation is in no queue and has no references.
            if block and not block.ref_cnt and block.prev_free_block is not None:
                self._pool.free_block_queue.remove(block)
                self._pool._maybe_evict_cached_block(block)
                self._pool.free_block_queue.prepend_n([block])

    def forget(self, block_ids: Iterable[int]) -> None:
        """Forget the keys of blocks that have one reference; they stay allocated."""
        self._pool.evict_blocks({i for i in block_ids if self._pool.blocks[i].ref_cnt == 1})

    def forget_all(self) -> None:
        """Forget the keys of all blocks, also of those in use.

        As when vLLM resets an idle pool, listeners hear of no evictions: nothing is to be stored.
        """
        listeners, self._pool.metrics_collector = self._pool.metrics_collector, None
        try:
            self._pool.evict_blocks(set(range(self._pool.num_gpu_blocks)))
        finally:
            self._pool.metrics_collector = listeners
        if listeners is not None:
            listeners.reset()

    def erase(self, pages: Container[Key]) -> list[int]:
        """Forget these canonical pages and all computed blocks, those in use, too.

        Returns all free blocks without a key: requests have left copies in them.
        """
        blocks = set[int]()
        for name, found in self._pool.cached_block_hash_to_block._cache.items():
            if not is_canonical(key := bytes(name[: -len(_GROUP_ID)])) or key in pages:
                blocks.update(found if isinstance(found, dict) else [found.block_id])
        self._pool.evict_blocks(blocks)
        every = self._pool.blocks
        return [b.block_id for b in every if not b.ref_cnt and b.block_hash is None]

    def is_last(self, block: "KVCacheBlock") -> bool:
        """Whether a block is the only one with its key."""
        found = self._pool.cached_block_hash_to_block._cache.get(block.block_hash)  # type: ignore[arg-type]
        return not isinstance(found, dict) or len(found) == 1

    def _find(self, key: Key) -> "KVCacheBlock | None":
        found = self._pool.get_cached_block(key, [0])  # type: ignore[arg-type]
        return found[0] if found else None


def key_of(block: "KVCacheBlock") -> Key | None:
    """The key under which a block is cached; None if it is not."""
    return None if block.block_hash is None else bytes(block.block_hash[: -len(_GROUP_ID)])


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
