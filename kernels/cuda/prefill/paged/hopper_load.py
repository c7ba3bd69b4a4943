"""Producers of paged prefill: warp groups that copy keys and values and re-rotate queries (Gluon).

The consumers, and how all groups run side by side, are in `hopper_prefill`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from picbench.kernels.cuda.async_copy import copy
from picbench.kernels.cuda.prefill.paged.key_tiles import KEYS
from picbench.kernels.cuda.prefill.query_tile import ROWS

#: Query rows of one consumer warp group, and keys of a tile.
SIDE, TILE = gl.constexpr(ROWS // 2), gl.constexpr(KEYS)
#: The RoPE shift of no key tile.
NO_SHIFT = gl.constexpr(1 << 30)

_MIX = """{{
.reg .b32 sum;
mul.rn.{0}x2 sum, $1, $2;
fma.rn.{0}x2 $0, $3, $4, sum;
}}"""
_MIX_BF16, _MIX_FP16 = gl.constexpr(_MIX.format("bf16")), gl.constexpr(_MIX.format("f16"))


@gluon.jit
def load_tiles(
    key: gl.tensor,
    value: gl.tensor,
    slots: gl.tensor,
    schedule: gl.tensor,
    count: gl.tensor,
    block_stride: gl.tensor,
    slot_stride: gl.tensor,
    keys: gl.tuple,
    values: gl.tuple,
    SIZE: gl.constexpr,
    FLAT: gl.constexpr,
) -> None:
    """Copies keys and values of each scheduled tile; hidden slots become zeros, even if NaN.

    `keys` and `values` are two buffers [128, SIZE] each and their barriers: ready, free.
    """
    k_smem, k_ready, k_free = keys
    v_smem, v_ready, v_free = values
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    lane = gl.arange(0, TILE, layout=gl.SliceLayout(1, layout))
    dim = gl.arange(0, SIZE, layout=gl.SliceLayout(0, layout))[None, :]
    slots += lane
    some = count > 0
    slot = gl.load(slots + gl.load(schedule, mask=some, other=0) * TILE)
    tile = gl.load(schedule + gl.minimum(1, count - 1), mask=some, other=0)
    for i in range(count):
        there = gl.maximum(slot, 0)
        if FLAT:
            at = there.to(gl.int64) * slot_stride
        else:
            at = (there // 16).to(gl.int64) * block_stride + (there % 16) * slot_stride
        at = at[:, None] + dim
        shown = (slot >= 0)[:, None]
        slot = gl.load(slots + tile * TILE)
        tile = gl.load(schedule + gl.minimum(i + 2, count - 1))
        stage = i & 1
        phase = (i >> 1) & 1
        # No fence between these copies and the products, as in CUTLASS's mainloop of the same two
        # instructions (collective/sm90_mma_multistage_gmma_ss_warpspecialized.hpp).
        mbarrier.wait(k_free.index(stage), phase ^ 1)
        copy(k_smem.index(stage), key + at, mask=shown)
        async_copy.mbarrier_arrive(k_ready.index(stage), increment_count=False)
        mbarrier.wait(v_free.index(stage), phase ^ 1)
        copy(v_smem.index(stage), value + at, mask=shown)
        async_copy.mbarrier_arrive(v_ready.index(stage), increment_count=False)


@gluon.jit
def _mix(  # type: ignore[no-untyped-def]
    x: gl.tensor, x_factor: gl.tensor, y: gl.tensor, y_factor: gl.tensor
):
    """x * x_factor + y * y_factor in a half type, two numbers at a time."""
    asm: gl.constexpr = _MIX_BF16 if x.dtype == gl.bfloat16 else _MIX_FP16
    arguments = [x, x_factor, y, y_factor]
    return gl.inline_asm_elementwise(asm, "=r,r,r,r,r", arguments, x.dtype, True, 2)


@gluon.jit
def _load_cos_sin(  # type: ignore[no-untyped-def]
    cos_sin: gl.tensor,
    shift: gl.tensor,
    layout: gl.constexpr,
    dtype: gl.constexpr,
    SIZE: gl.constexpr,
):
    """Cosines and sines [1, SIZE / 2] of a signed RoPE shift, rounded to the queries' type.

    With rounded ones the output's relative error is 0.0034 in bfloat16 (0.0031 with exact ones on
    512 queries and more), and 256 queries over 32k keys take 2 % less time (an H200).
    """
    half: gl.constexpr = SIZE // 2
    dim = gl.arange(0, half, layout=gl.SliceLayout(0, layout))
    at = cos_sin + gl.abs(shift).to(gl.int64) * SIZE + dim
    sin = gl.load(at + half)
    return gl.load(at).to(dtype)[None, :], gl.where(shift < 0, -sin, sin).to(dtype)[None, :]


@gluon.jit
def rotate_queries(
    query: gl.tensor,
    cos_sin: gl.tensor,
    schedule: gl.tensor,
    rope_shift: gl.tensor,
    first: gl.tensor,
    queries: gl.tensor,
    kv_head: gl.tensor,
    count: gl.tensor,
    query_stride: gl.tensor,
    query_head: gl.tensor,
    q_smem: gl.shared_memory_descriptor,
    rotated: gl.tuple,
    SIZE: gl.constexpr,
    GROUP: gl.constexpr,
    PADDED: gl.constexpr,
) -> None:
    """Keeps the program's queries and re-rotates them before each key tile whose shift differs.

    `q_smem` holds the queries, `rotated` two versions of them, two halves [64, SIZE] each, and
    their barriers: ready, free. Version v is for the v-th run of tiles of one shift.
    """
    q_rotated, q_ready, q_free = rotated
    half: gl.constexpr = SIZE // 2
    step: gl.constexpr = 256 // (half // 4)
    dtype: gl.constexpr = q_smem.dtype
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // half, half // 8], [4, 1], [1, 0])
    whole: gl.constexpr = gl.BlockedLayout([1, 8], [256 // SIZE, SIZE // 8], [4, 1], [1, 0])
    if count > 0:
        dim = gl.arange(0, SIZE, layout=gl.SliceLayout(0, whole))[None, :]
        lane = gl.arange(0, step, layout=gl.SliceLayout(1, whole))
        for j in gl.static_range(2 * SIDE // step):
            row = j * step + lane
            token = row // PADDED
            wanted = (token < queries) & (row % PADDED < GROUP)
            head = kv_head * GROUP + row % PADDED
            at = (first + token).to(gl.int64) * query_stride + head * query_head
            rows = gl.load(query + at[:, None] + dim, mask=wanted[:, None], other=0.0)
            q_smem.index(j * step // SIDE).slice(j * step % SIDE, step).store(rows)
    version = 0
    shift = NO_SHIFT
    for i in range(count):
        last = shift
        shift = gl.load(rope_shift + gl.load(schedule + i))
        if shift != last:
            to = version & 1
            cos, sin = _load_cos_sin(cos_sin, shift, layout, dtype, SIZE)
            mbarrier.wait(q_free.index(to), ((version >> 1) & 1) ^ 1)
            for j in gl.static_range(2 * SIDE // step):
                own = q_smem.index(j * step // SIDE).slice(j * step % SIDE, step)
                low = own.slice(0, half, dim=1).load(layout)
                high = own.slice(half, half, dim=1).load(layout)
                low_rotated = _mix(low, cos, high, sin)
                high_rotated = _mix(high, cos, low, -sin)
                out = q_rotated.index(to * 2 + j * step // SIDE).slice(j * step % SIDE, step)
                out.slice(0, half, dim=1).store(low_rotated)
                out.slice(half, half, dim=1).store(high_rotated)
            fence_async_shared()
            mbarrier.arrive(q_ready.index(to), count=1)
            version += 1
