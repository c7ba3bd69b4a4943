"""vLLM's block pool as the linker sees it: what is resident, and holding it there."""

from typing import TYPE_CHECKING

from picbench.engines.keys import Key

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class Pool:
    """Lookup and reference counts over a `vllm.v1.core.block_pool.BlockPool`."""

    def __init__(self, block_pool: "BlockPool") -> None:
        self._pool = block_pool

    @property
    def usable(self) -> int:
        """Blocks that requests can hold; vLLM keeps block 0 for itself."""
        return self._pool.num_gpu_blocks - 1

    def resident(self, key: Key) -> bool:
        """Whether a block with this key is in the pool, in use or idle."""
        return self._find(key) is not None

    def hold(self, key: Key) -> "KVCacheBlock | None":
        """Take a reference to a block, so that it is not evicted; None if it is not resident."""
        block = self._find(key)
        if block is not None:
            self._pool.touch([block])
        return block

    def release(self, blocks: "list[KVCacheBlock]") -> None:
        """Give references back; the last block of the list is evicted first."""
        self._pool.free_blocks(reversed(blocks))

    def _find(self, key: Key) -> "KVCacheBlock | None":
        found = self._pool.get_cached_block(key, [0])  # type: ignore[arg-type]
        return found[0] if found else None
