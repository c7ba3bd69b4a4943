"""Copies of the tiles that decode reads on Hopper, block by block, into shared memory (Gluon)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from picbench.kernels.cuda.async_copy import copy
from picbench.kernels.cuda.decode.request_table import TILE_BLOCKS
from picbench.kernels.paging import BLOCK_SIZE

#: Blocks of a tile, slots of a block, and keys of a tile.
BLOCKS, SLOTS = gl.constexpr(TILE_BLOCKS), gl.constexpr(BLOCK_SIZE)
KEYS = gl.constexpr(TILE_BLOCKS * BLOCK_SIZE)


@gluon.jit
def tile_blocks(
    blocks: gl.tensor, bits: gl.tensor, tile: gl.tensor, last: gl.tensor, layout: gl.constexpr
) -> tuple[gl.tensor, gl.tensor]:
    """The cache blocks of a tile and the visible slots of each; none after the last tile."""
    at = gl.minimum(tile, last - 1) * BLOCKS + gl.arange(0, BLOCKS, layout=layout)
    return gl.load(blocks + at), gl.where(tile < last, gl.load(bits + at), 0)


@gluon.jit
def copy_tile(
    smem: gl.shared_memory_descriptor,
    base: gl.tensor,
    block: gl.tensor,
    bits: gl.tensor,
    block_stride: gl.tensor,
    slot_stride: gl.tensor,
    SIZE: gl.constexpr,
    SPREAD: gl.constexpr,
) -> None:
    """Begins to copy the keys or values of a tile; hidden slots become zeros, even if NaN.

    SPREAD is a layout of [blocks, slots, dimensions] in which a warp copies one block.
    """
    flat: gl.constexpr = gl.BlockedLayout(
        SPREAD.size_per_thread[1:], SPREAD.threads_per_warp[1:], [BLOCKS, 1], [1, 0]
    )
    lanes: gl.constexpr = gl.SliceLayout(1, flat)
    slot = gl.arange(0, SLOTS, layout=gl.SliceLayout(0, gl.SliceLayout(2, SPREAD)))[None, :]
    dim = gl.arange(0, SIZE, layout=gl.SliceLayout(0, flat))[None, :]
    row = (block.to(gl.int64) * block_stride)[:, None] + slot * slot_stride
    shown = ((bits[:, None] >> slot) & 1) != 0
    row = gl.convert_layout(row.reshape([KEYS]), lanes, assert_trivial=True)
    shown = gl.convert_layout(shown.reshape([KEYS]), lanes, assert_trivial=True)
    copy(smem, base + gl.multiple_of(row, 8)[:, None] + dim, mask=shown[:, None])
