"""The layout of keys and values in the paged cache of one layer, on CPU.

The cache of a layer is one tensor [num_blocks, num_kv_heads, 16, 2 * head_size]. Each (block, head)
tile holds the keys in its first half and the values in its second half:

    key    [head_size, 16]   one row a dimension: 16 slots are rotated and multiplied at once
    value  [16, head_size]   one row a slot

This is the tile that vLLM's `vec16` CPU kernel reads (csrc/cpu/cpu_attn_vec16.hpp). Code outside
this package reads a tile through `split`, or moves whole blocks. On CUDA the layout is that of
vLLM's backend (`cuda.layout`); block size and GAP are the same.
"""

from torch import Tensor

from picbench.errors import EngineError

#: Slots in a block.
BLOCK_SIZE = 16
BLOCK_BITS = BLOCK_SIZE.bit_length() - 1

#: Logical position of a slot that no query may see: padding and replaced tokens.
GAP = 1 << 30


def split(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Views of all keys and all values, each [num_blocks, num_kv_heads, 16, head_size].

    Raises EngineError when blocks are not 16 slots long or tiles are not contiguous.
    """
    key, value = halves(kv_cache)
    blocks, heads, slots, size = key.shape
    return key.view(blocks, heads, size, slots).transpose(-1, -2), value


def halves(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """The key halves and the value halves of all tiles, as vLLM's CPU kernels take them.

    Both are [num_blocks, num_kv_heads, 16, head_size], but the key half only in name: its elements
    keep their own order. Raises EngineError as `split` does.
    """
    blocks, heads, slots, width = kv_cache.shape
    if slots != BLOCK_SIZE or kv_cache.stride()[2:] != (width, 1):
        raise EngineError(
            f"KV cache {tuple(kv_cache.shape)} with strides {kv_cache.stride()} cannot be read",
            hint=f"use block size {BLOCK_SIZE} and contiguous (block, head) tiles",
        )
    key, value = kv_cache.view(blocks, heads, 2 * slots, width // 2).chunk(2, dim=2)
    return key, value


def flat_slots(table: Tensor, order: Tensor) -> Tensor:
    """Cache slots (block * 16 + offset) of a request's own slots `order` [n], as int64 [n].

    `table` [blocks] names the request's blocks.
    """
    return table.long()[order // BLOCK_SIZE] * BLOCK_SIZE + order % BLOCK_SIZE
