"""Writes new keys and values to their slots of the paged cache (Triton)."""

import triton
import triton.language as tl
from torch import Tensor

from picbench.kernels.cuda.layout import key_value
from picbench.kernels.paging import BLOCK_SIZE


def store(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes `key` and `value`, both [tokens, num_kv_heads, head_size], to their cache slots.

    `slot_mapping` [n <= tokens] holds flat slots (block * 16 + offset); tokens with a negative slot
    and tokens behind the n-th are skipped. `kv_cache` is a layer's cache as `layout` describes it.
    Slots must be distinct. Keys are written as they are: nothing is rotated.
    """
    key_cache, value_cache = key_value(kv_cache)
    _, heads, size = key.shape
    if not len(slot_mapping):
        return
    _store[(len(slot_mapping),)](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        slot_mapping.stride(0),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        heads,
        size,
        BLOCK=BLOCK_SIZE,
        HEADS=triton.next_power_of_2(heads),
        SIZE=triton.next_power_of_2(size),
    )


def store_reference(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """`store` in plain torch."""
    count = len(slot_mapping)
    keep = slot_mapping >= 0
    slots = slot_mapping[keep]
    for cache, new in zip(key_value(kv_cache), (key, value), strict=True):
        cache[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = new[:count][keep]


@triton.jit
def _store(
    key: tl.tensor,
    value: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    slots: tl.tensor,
    key_token: tl.tensor,
    key_head: tl.tensor,
    value_token: tl.tensor,
    value_head: tl.tensor,
    slot_step: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    heads: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token * slot_step).to(tl.int64)
    if slot < 0:
        return
    head = tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, SIZE)[None, :]
    inside = (head < heads) & (dim < size)
    to = (slot // BLOCK) * block_stride + (slot % BLOCK) * slot_stride + head * head_stride + dim
    k = tl.load(key + token * key_token + head * key_head + dim, mask=inside)
    v = tl.load(value + token * value_token + head * value_head + dim, mask=inside)
    tl.store(key_cache + to, k, mask=inside)
    tl.store(value_cache + to, v, mask=inside)
