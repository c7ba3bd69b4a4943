"""Views of a layer's paged cache as CUDA kernels read it.

vLLM's cache of a layer is logically [num_blocks, num_kv_heads, 16, 2 * head_size], keys in the
first half of the last dimension; strides depend on the platform and on the attention backend
(vllm/v1/kv_cache_layout.py).
"""

import torch
from torch import Tensor

from picbench.errors import EngineError
from picbench.kernels.paging import BLOCK_SIZE


def key_value(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Views of keys and values, each [num_blocks, 16, num_kv_heads, head_size], rows contiguous.

    Raises EngineError when blocks are not 16 slots long or a slot's dimensions not contiguous.
    """
    if kv_cache.shape[2] != BLOCK_SIZE or kv_cache.stride(-1) != 1:
        raise EngineError(
            f"KV cache {tuple(kv_cache.shape)} with strides {kv_cache.stride()} cannot be read",
            hint=f"use block size {BLOCK_SIZE} and one of vLLM's own layouts",
        )
    size = kv_cache.shape[-1] // 2
    slots = kv_cache.transpose(1, 2)
    key, value = torch.split(slots, size, -1)
    return key, value


def cache_slots(block_table: Tensor, at: Tensor, offset: Tensor, size: Tensor) -> Tensor:
    """Slots of the cache, of the shape of `at`, by their places in a block table; all are int32.

    `at` is the place of a slot's block in the flattened `block_table` [requests, blocks], `offset`
    the number of slots before it in that block, `size` the slots of a block. Where there is no slot
    these are any place, -1 and 0, and the result is -1.
    """
    return torch.addcmul(offset, block_table.flatten()[at], size)
