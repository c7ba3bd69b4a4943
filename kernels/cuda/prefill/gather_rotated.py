"""Copies keys and values into pages in logical order, keys rotated on the way (Triton)."""

import triton
import triton.language as tl
from torch import Tensor

from picbench.kernels.cuda.layout import key_value
from picbench.kernels.cuda.pairing import pair_of
from picbench.kernels.cuda.repeated_launch import RepeatedLaunch
from picbench.kernels.paging import BLOCK_SIZE
from picbench.kernels.rope import RopeTable

#: Keys of a page of the workspace: what FlashAttention-3 loads at a time, through TMA.
PAGE = 128

# Keys that one program copies; divides PAGE.
_TILE = 16


def gather(
    launch: RepeatedLaunch,
    kv_cache: Tensor,
    slots: Tensor,
    rope_shift: Tensor,
    rope: RopeTable,
    key: Tensor,
    value: Tensor,
) -> None:
    """Fills the first n keys of `key` and `value`, both [pages, PAGE, kv_heads, size].

    `slots` [n] int64 are flat cache slots, n a multiple of PAGE; `rope_shift` [n] int32 is by how
    much each key is still to be rotated. Keys with a negative slot are zeros. `kv_cache` may be a
    slice of some KV heads of a layer's cache; `key` and `value` have as many heads. `launch` is
    that of `gather_pages`.
    """
    key_cache, value_cache = key_value(kv_cache)
    heads, size = key.shape[2:]
    read = (key_cache, value_cache, slots, rope_shift, rope.cos_sin_cache)
    launch(
        (len(slots) // _TILE, heads, 1),
        (*read, key, value, *key_cache.stride()[:3], heads),
        {
            "BLOCK": BLOCK_SIZE,
            "SIZE": size,
            "ROTARY": rope.rotary_dim,
            "NEOX": rope.is_neox,
            "TILE": _TILE,
            "num_warps": 4,
        },
    )


# KV heads are gathered in as many passes as the workspace is too small for a context.
@triton.jit(do_not_specialize=["heads"])
def gather_pages(
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    slots: tl.tensor,
    rope_shift: tl.tensor,
    cos_sin: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    heads: tl.tensor,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    ROTARY: tl.constexpr,
    NEOX: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Copies TILE keys and values of one KV head; grid (n / TILE, kv_heads). See `gather`."""
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    head = tl.program_id(1)
    slot = tl.load(slots + place)
    shift = tl.load(rope_shift + place)
    there = (slot >= 0)[:, None]
    dim = tl.arange(0, SIZE)
    rotates = (dim < ROTARY)[None, :]
    paired_dim, column, first = pair_of(dim, ROTARY, NEOX)
    sign = tl.where(first, -1.0, 1.0)[None, :]
    at = (slot // BLOCK) * block_stride + (slot % BLOCK) * slot_stride + head * head_stride
    own = tl.load(key_cache + at[:, None] + dim[None, :], mask=there, other=0.0)
    paired = tl.load(key_cache + at[:, None] + paired_dim[None, :], mask=there, other=0.0)
    row = cos_sin + tl.abs(shift).to(tl.int64)[:, None] * ROTARY + column[None, :]
    cos = tl.load(row, mask=there & rotates, other=1.0).to(tl.float32)
    sin = tl.load(row + ROTARY // 2, mask=there & rotates, other=0.0).to(tl.float32)
    sin = tl.where((shift < 0)[:, None], -sin, sin)
    rotated = own.to(tl.float32) * cos + paired.to(tl.float32) * (sign * sin)
    to = (place[:, None] * heads + head) * SIZE + dim[None, :]
    tl.store(key + to, rotated.to(key.dtype.element_ty))
    moved = tl.load(value_cache + at[:, None] + dim[None, :], mask=there, other=0.0)
    tl.store(value + to, moved)
