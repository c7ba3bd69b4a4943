"""Decode on Hopper: `split_kv.decode_tiles` with keys as the rows of products (Gluon).

A product of Hopper's tensor cores has at least 64 rows, and a KV head has few queries. So scores
are K Q^T and the output is V^T P^T: keys and dimensions are the rows, queries the columns, at least
eight. Keys and values are read from where the copies put them, and a thread holds one score in 128
of a tile. A warp issues 318 instructions a tile where `split_kv` takes 595 (Triton 3.6, heads of
128): 256 requests of 32k tokens run at 1.00 instead of 0.96 of FlashAttention-3's speed, in chunks
of 150 tokens 64 do at 0.99 instead of 0.81 (one H200).

Keys and values have two buffers each. Keys are waited for while values of the same tile are still
in flight, and a buffer is filled again once the products that read it are done. With three buffers
each a multiprocessor holds two programs instead of three: one request of 32k tokens gains 3 %, 64
and 256 stay within half a percent.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from picbench.kernels.cuda.base_two import LN2
from picbench.kernels.cuda.decode.hopper_tiles import BLOCKS, KEYS, SLOTS, copy_tile, tile_blocks


@gluon.jit
def _load_seen(  # type: ignore[no-untyped-def]
    bits: gl.tensor, tile: gl.tensor, last: gl.tensor, layout: gl.constexpr
):
    """Which keys of a tile are visible; after the last tile, those of the last."""
    lane = gl.arange(0, KEYS, layout=layout)
    seen = gl.load(bits + gl.minimum(tile, last - 1) * BLOCKS + lane // SLOTS)
    return ((seen >> (lane % SLOTS)) & 1) != 0


@gluon.jit
def _cos_sin_of(  # type: ignore[no-untyped-def]
    cos_sin: gl.tensor, shift: gl.tensor, dim: gl.tensor, SIZE: gl.constexpr
):
    """Cosines and sines [SIZE / 2] of a signed RoPE shift."""
    at = cos_sin + gl.abs(shift).to(gl.int64) * SIZE + dim
    sin = gl.load(at + SIZE // 2).to(gl.float32)
    return gl.load(at).to(gl.float32), gl.where(shift < 0, -sin, sin)


@gluon.jit
def _rotate_query(
    q_smem: gl.shared_memory_descriptor,
    low: gl.tensor,
    high: gl.tensor,
    cos: gl.tensor,
    sin: gl.tensor,
) -> None:
    """Rotates the queries, halves [COLUMNS, SIZE / 2] each, by the opposite of the shift."""
    low_rotated = low * cos[None, :] + high * sin[None, :]
    high_rotated = high * cos[None, :] - low * sin[None, :]
    # One store: between two into the same buffer the compiler places a barrier.
    rotated = gl.join(low_rotated, high_rotated).permute((0, 2, 1)).reshape(q_smem.shape)
    q_smem.store(rotated.to(q_smem.dtype))


@gluon.jit
def _store_split(
    partial: gl.tensor,
    lse: gl.tensor,
    index: gl.tensor,
    kv_head: gl.tensor,
    col_max: gl.tensor,
    col_sum: gl.tensor,
    acc: gl.tensor,
    HEADS: gl.constexpr,
    SIZE: gl.constexpr,
    GROUP: gl.constexpr,
) -> None:
    """Stores a split's output [SIZE, columns] and log-sum-exp, -inf if it saw nothing."""
    some = col_sum > 0.0
    nonzero = gl.where(some, col_sum, 1.0)
    member = gl.arange(0, acc.shape[1], layout=col_max.type.layout)
    row = index.to(gl.int64) * HEADS + kv_head * GROUP + member
    logs = gl.where(some, (col_max + gl.log2(nonzero)) * LN2, float("-inf"))
    gl.store(lse + row, logs, mask=member < GROUP)
    dim = gl.arange(0, SIZE, layout=gl.SliceLayout(1, acc.type.layout))
    at = partial + (row * SIZE)[None, :] + dim[:, None]
    gl.store(at, acc / nonzero[None, :], mask=(member < GROUP)[None, :])


@gluon.jit(do_not_specialize=["splits"])
def decode_transposed(
    query: gl.tensor,
    key: gl.tensor,
    value: gl.tensor,
    blocks: gl.tensor,
    seen_bits: gl.tensor,
    rope_shift: gl.tensor,
    tiles: gl.tensor,
    table_rows: gl.tensor,
    cos_sin: gl.tensor,
    partial: gl.tensor,
    lse: gl.tensor,
    scale: gl.tensor,
    query_stride: gl.tensor,
    block_stride: gl.tensor,
    slot_stride: gl.tensor,
    head_stride: gl.tensor,
    list_stride: gl.tensor,
    shift_stride: gl.tensor,
    splits: gl.tensor,
    HEADS: gl.constexpr,
    SIZE: gl.constexpr,
    GROUP: gl.constexpr,
    COLUMNS: gl.constexpr,
) -> None:
    """Partial attention as `split_kv.decode_tiles`, with the same arguments; 4 warps.

    For heads of 64 or 128 dimensions, all of them rotated, in half precision. COLUMNS is a power of
    two from 8 to 16 that is not less than GROUP.
    """
    kv_head = gl.program_id(0)
    split = gl.program_id(1)
    request = gl.program_id(2)
    count = gl.load(tiles + request)
    length = gl.cdiv(count, splits)
    first = split * length
    last = gl.minimum(first + length, count)
    if first >= last:
        return

    dtype: gl.constexpr = query.dtype.element_ty
    half: gl.constexpr = SIZE // 2
    across: gl.constexpr = SIZE // 8
    spread: gl.constexpr = gl.BlockedLayout(
        [1, across // 2, 8], [1, 32 // across, across], [4, 1, 1], [2, 1, 0]
    )
    block_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, spread))
    paired: gl.constexpr = gl.BlockedLayout([1, half // 16], [2, 16], [4, 1], [1, 0])
    joint: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, SIZE], dtype)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLUMNS, SIZE], dtype)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLUMNS, KEYS], dtype)
    k_smem = gl.allocate_shared_memory(dtype, [2, KEYS, SIZE], tile_layout)
    v_smem = gl.allocate_shared_memory(dtype, [2, KEYS, SIZE], tile_layout)
    q_smem = gl.allocate_shared_memory(dtype, [COLUMNS, SIZE], q_layout)
    p_smem = gl.allocate_shared_memory(dtype, [COLUMNS, KEYS], p_layout)

    blocks += request.to(gl.int64) * list_stride
    seen_bits += request.to(gl.int64) * list_stride
    rope_shift += gl.load(table_rows + request).to(gl.int64) * shift_stride
    key += kv_head * head_stride
    value += kv_head * head_stride
    block, bits = tile_blocks(blocks, seen_bits, first, last, block_layout)
    block_1, bits_1 = tile_blocks(blocks, seen_bits, first + 1, last, block_layout)
    block_2, bits_2 = tile_blocks(blocks, seen_bits, first + 2, last, block_layout)
    copy_tile(k_smem.index(0), key, block, bits, block_stride, slot_stride, SIZE, spread)
    async_copy.commit_group()
    copy_tile(v_smem.index(0), value, block, bits, block_stride, slot_stride, SIZE, spread)
    async_copy.commit_group()
    copy_tile(k_smem.index(1), key, block_1, bits_1, block_stride, slot_stride, SIZE, spread)
    async_copy.commit_group()

    member = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, paired))
    dim = gl.arange(0, half, layout=gl.SliceLayout(0, paired))
    at = query + request * query_stride + (kv_head * GROUP + member)[:, None] * SIZE + dim[None, :]
    low = gl.load(at, mask=(member < GROUP)[:, None], other=0.0).to(gl.float32)
    high = gl.load(at + half, mask=(member < GROUP)[:, None], other=0.0).to(gl.float32)
    cos, sin = _cos_sin_of(cos_sin, gl.load(rope_shift + first), dim, SIZE)
    _rotate_query(q_smem, low, high, cos, sin)
    fence_async_shared()
    cos, sin = _cos_sin_of(
        cos_sin, gl.load(rope_shift + gl.minimum(first + 1, last - 1)), dim, SIZE
    )
    shift = gl.load(rope_shift + gl.minimum(first + 2, last - 1))

    seen = _load_seen(seen_bits, first, last, gl.SliceLayout(1, joint))
    col_max = gl.full([COLUMNS], float("-inf"), gl.float32, gl.SliceLayout(0, joint))
    col_sum = gl.zeros([KEYS, COLUMNS], gl.float32, joint)
    acc = gl.zeros([SIZE, COLUMNS], gl.float32, joint)
    zero = gl.zeros([KEYS, COLUMNS], gl.float32, joint)
    for tile in range(first, last):
        stage = (tile - first) & 1
        # In flight, in this order: values of this tile, keys of the next.
        async_copy.wait_group(2)
        copy_tile(
            v_smem.index(stage ^ 1), value, block_1, bits_1, block_stride, slot_stride, SIZE, spread
        )
        async_copy.commit_group()
        product = warpgroup_mma(
            k_smem.index(stage), q_smem.permute((1, 0)), zero, use_acc=False, is_async=True
        )
        next_seen = _load_seen(seen_bits, tile + 1, last, gl.SliceLayout(1, joint))
        block_1, bits_1 = block_2, bits_2
        block_2, bits_2 = tile_blocks(blocks, seen_bits, tile + 3, last, block_layout)
        scores = warpgroup_mma_wait(0, [product]) * scale
        scores = gl.where(seen[:, None], scores, float("-inf"))
        peak = gl.maximum(col_max, gl.max(scores, 0))
        # All warps are done with these keys: the maximum was reduced across them.
        copy_tile(
            k_smem.index(stage), key, block_1, bits_1, block_stride, slot_stride, SIZE, spread
        )
        async_copy.commit_group()
        safe = gl.where(peak == float("-inf"), 0.0, peak)
        weight = gl.exp2(scores - safe[None, :])
        rescale = gl.exp2(col_max - safe)
        # Each thread sums up its own keys' weights; the threads' sums are added at the end.
        col_sum = col_sum * rescale[None, :] + weight
        acc = acc * rescale[None, :]
        col_max, seen = peak, next_seen
        p_smem.store(weight.to(dtype).permute((1, 0)))
        _rotate_query(q_smem, low, high, cos, sin)
        fence_async_shared()
        # In flight after these values: keys and values of the next tile, keys of the one after.
        async_copy.wait_group(3)
        sums = warpgroup_mma(
            v_smem.index(stage).permute((1, 0)), p_smem.permute((1, 0)), acc, is_async=True
        )
        cos, sin = _cos_sin_of(cos_sin, shift, dim, SIZE)
        shift = gl.load(rope_shift + gl.minimum(tile + 3, last - 1))
        acc = warpgroup_mma_wait(0, [sums])
    async_copy.wait_group(0)
    index = request * splits + split
    _store_split(partial, lse, index, kv_head, col_max, gl.sum(col_sum, 0), acc, HEADS, SIZE, GROUP)
