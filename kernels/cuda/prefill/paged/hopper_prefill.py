"""Paged prefill in place over keys that are cached with RoPE (Gluon, Hopper).

A program serves one KV head and 128 query rows (tokens times packed heads), and reads the tiles of
128 keys that the schedule names; the keys of a tile share a RoPE shift. Four warp groups run side
by side. Two produce (`hopper_load`): one copies keys and values from their pages, one re-rotates
the queries for the next tile whose shift differs, since <q, R(s) k> = <R(-s) q, k>. Two consume, 64
rows each: the scores of a tile are multiplied while the softmax weights of the tile before are
(FlashAttention-3, Shah et al., arXiv 2407.08608, section 3.2).

The two consumers share no barrier but those of the buffers: eight warps in one group took 1.3 times
as long, as each step then waits for all. Tiles that need a mask come first, in a loop of their own,
because a branch in the loop cost 5 % (both on one H200).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from picbench.kernels.cuda.base_two import LN2
from picbench.kernels.cuda.prefill.paged.hopper_load import (
    NO_SHIFT,
    SIDE,
    TILE,
    load_tiles,
    rotate_queries,
)
from picbench.kernels.cuda.prefill.paged.key_tiles import LOOSE

# Registers of a thread that attends, and of one that rotates queries; a thread that copies gets as
# many as the latter. All 512 threads share 65,536.
_ATTENDING, _ROTATING = gl.constexpr(216), gl.constexpr(40)

_LOOSE = gl.constexpr(LOOSE)


@gluon.jit
def _softmax(  # type: ignore[no-untyped-def]
    scores: gl.tensor, row_max: gl.tensor, row_sum: gl.tensor, scale: gl.tensor
):
    """One step of the online softmax in base 2; `scale` includes log2(e).

    Returns the new maxima and sums [64], the weights [64, 128] and the factor [64] of older ones.
    """
    peak = gl.maximum(row_max, gl.max(scores, 1) * scale)
    safe = gl.where(peak == float("-inf"), 0.0, peak)
    weight = gl.exp2(scores * scale - safe[:, None])
    rescale = gl.exp2(row_max - safe)
    return peak, row_sum * rescale + gl.sum(weight, 1), weight, rescale


@gluon.jit
def _mask(  # type: ignore[no-untyped-def]
    scores: gl.tensor,
    kpos: gl.tensor,
    tile: gl.tensor,
    sees: gl.tensor,
    shown: gl.tensor,
    MASKED: gl.constexpr,
):
    """Masks keys after each row's position (`sees`), or those after the first `shown`."""
    lane = gl.arange(0, TILE, layout=gl.SliceLayout(0, scores.type.layout))
    if MASKED:
        seen = gl.load(kpos + tile * TILE + lane)[None, :] <= sees[:, None]
    else:
        # Which registers hold the first lanes is static: the compiler masks only the others.
        seen = ((lane < TILE - _LOOSE) | (lane < shown))[None, :]
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def _next_queries(  # type: ignore[no-untyped-def]
    shift: gl.tensor,
    next_shift: gl.tensor,
    version: gl.tensor,
    q_ready: gl.shared_memory_descriptor,
    q_free: gl.shared_memory_descriptor,
):
    """Releases the queries of the last shift and waits for those of the next, if they differ."""
    if next_shift != shift:
        if version >= 0:
            mbarrier.arrive(q_free.index(version & 1), count=1)
        version += 1
        mbarrier.wait(q_ready.index(version & 1), (version >> 1) & 1)
    return version


@gluon.jit
def _mainloop(  # type: ignore[no-untyped-def]
    begin: gl.tensor,
    end: gl.tensor,
    state: gl.tuple,
    tiles: gl.tuple,
    sees: gl.tensor,
    scale: gl.tensor,
    zero: gl.tensor,
    rotated: gl.tuple,
    keys: gl.tuple,
    values: gl.tuple,
    HALF: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Attends to the scheduled tiles begin .. end, at least one.

    Takes and returns the state: `acc` [64, SIZE], `row_max` and `row_sum` [64], float32, the shift
    of the queries in use, and the number of their version (see `rotate_queries`).
    """
    acc, row_max, row_sum, shift, version = state
    schedule, rope_shift, shown, kpos = tiles
    q_rotated, q_ready, q_free = rotated
    k_smem, k_ready, k_free = keys
    v_smem, v_ready, v_free = values
    weights: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    dtype: gl.constexpr = q_rotated.dtype
    tile = gl.load(schedule + begin)
    next_shift = gl.load(rope_shift + tile)
    version = _next_queries(shift, next_shift, version, q_ready, q_free)
    shift = next_shift
    stage = begin & 1
    mbarrier.wait(k_ready.index(stage), (begin >> 1) & 1)
    own = q_rotated.index((version & 1) * 2 + HALF)
    k = k_smem.index(stage).permute((1, 0))
    product = warpgroup_mma(own, k, zero, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, [product])
    mbarrier.arrive(k_free.index(stage), count=1)
    scores = _mask(scores, kpos, tile, sees, gl.load(shown + tile), MASKED)
    row_max, row_sum, weight, rescale = _softmax(scores, row_max, row_sum, scale)
    acc = acc * gl.convert_layout(rescale, rows)[:, None]
    p = gl.convert_layout(weight.to(dtype), weights)
    tile = gl.load(schedule + gl.minimum(begin + 1, end - 1))
    next_shift = gl.load(rope_shift + tile)
    next_shown = gl.load(shown + tile)
    ahead = gl.load(schedule + gl.minimum(begin + 2, end - 1))
    for i in range(begin + 1, end):
        version = _next_queries(shift, next_shift, version, q_ready, q_free)
        shift = next_shift
        own_shown = next_shown
        own_tile = tile
        tile = ahead
        next_shift = gl.load(rope_shift + tile)
        next_shown = gl.load(shown + tile)
        ahead = gl.load(schedule + gl.minimum(i + 2, end - 1))
        stage = i & 1
        back = stage ^ 1
        mbarrier.wait(k_ready.index(stage), (i >> 1) & 1)
        own = q_rotated.index((version & 1) * 2 + HALF)
        k = k_smem.index(stage).permute((1, 0))
        product = warpgroup_mma(own, k, zero, use_acc=False, is_async=True)
        mbarrier.wait(v_ready.index(back), ((i - 1) >> 1) & 1)
        next_acc = warpgroup_mma(p, v_smem.index(back), acc, is_async=True)
        scores = warpgroup_mma_wait(1, [product])
        mbarrier.arrive(k_free.index(stage), count=1)
        scores = _mask(scores, kpos, own_tile, sees, own_shown, MASKED)
        row_max, row_sum, weight, rescale = _softmax(scores, row_max, row_sum, scale)
        acc = warpgroup_mma_wait(0, [next_acc])
        mbarrier.arrive(v_free.index(back), count=1)
        acc = acc * gl.convert_layout(rescale, rows)[:, None]
        p = gl.convert_layout(weight.to(dtype), weights)
    back = (end - 1) & 1
    mbarrier.wait(v_ready.index(back), ((end - 1) >> 1) & 1)
    next_acc = warpgroup_mma(p, v_smem.index(back), acc, is_async=True)
    acc = warpgroup_mma_wait(0, [next_acc])
    mbarrier.arrive(v_free.index(back), count=1)
    return acc, row_max, row_sum, shift, version


@gluon.jit
def _attend(  # type: ignore[no-untyped-def]
    step: gl.tuple,
    own: gl.tensor,
    rest: gl.tuple,
    HALF: gl.constexpr,
    SIZE: gl.constexpr,
    GROUP: gl.constexpr,
    PADDED: gl.constexpr,
    SPLIT: gl.constexpr,
):
    """Attends with one half of the rows to its `own` key tiles, the first `masked` with a mask."""
    out, partial, lse, tiles, qpos, first, queries, kv_head, masked = step
    count, split, splits, scale, out_stride, out_head, heads, rotated, keys, values = rest
    _, q_ready, q_free = rotated
    _, k_ready, k_free = keys
    _, v_ready, v_free = values
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    row = gl.arange(0, SIDE, layout=gl.SliceLayout(1, s_layout))
    token = HALF * (SIDE // PADDED) + row // PADDED
    wanted = (token < queries) & (row % PADDED < GROUP)
    sees = gl.load(qpos + first + token, mask=wanted, other=-1)
    row_max = gl.full([SIDE], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
    row_sum = gl.zeros([SIDE], gl.float32, gl.SliceLayout(1, s_layout))
    acc = gl.zeros([SIDE, SIZE], gl.float32, o_layout)
    zero = gl.zeros([SIDE, TILE], gl.float32, s_layout)
    schedule, rope_shift, _, _ = tiles
    shift = NO_SHIFT
    version = -1
    if masked > 0:
        acc, row_max, row_sum, shift, version = _mainloop(
            0, masked, (acc, row_max, row_sum, shift, version), tiles, sees, scale, zero,
            rotated, keys, values, HALF, True,
        )  # fmt: skip
    if masked < own:
        acc, row_max, row_sum, shift, version = _mainloop(
            masked, own, (acc, row_max, row_sum, shift, version), tiles, sees, scale, zero,
            rotated, keys, values, HALF, False,
        )  # fmt: skip
    # The other half has tiles left: their buffers are released for both.
    for i in range(own, count):
        next_shift = gl.load(rope_shift + gl.load(schedule + i))
        version = _next_queries(shift, next_shift, version, q_ready, q_free)
        shift = next_shift
        mbarrier.wait(k_ready.index(i & 1), (i >> 1) & 1)
        mbarrier.arrive(k_free.index(i & 1), count=1)
        mbarrier.wait(v_ready.index(i & 1), (i >> 1) & 1)
        mbarrier.arrive(v_free.index(i & 1), count=1)

    sums = gl.convert_layout(row_sum, gl.SliceLayout(1, o_layout))
    some = sums > 0.0
    nonzero = gl.where(some, sums, 1.0)
    result = acc * (1.0 / nonzero)[:, None]
    row = gl.arange(0, SIDE, layout=gl.SliceLayout(1, o_layout))
    dim = gl.arange(0, SIZE, layout=gl.SliceLayout(0, o_layout))[None, :]
    token = HALF * (SIDE // PADDED) + row // PADDED
    wanted = (token < queries) & (row % PADDED < GROUP)
    head = kv_head * GROUP + row % PADDED
    token = (first + token).to(gl.int64)
    if SPLIT:
        to = (token * splits + split) * heads + head
        peak = gl.convert_layout(row_max, gl.SliceLayout(1, o_layout))
        logs = gl.where(some, peak + gl.log2(nonzero), float("-inf"))
        gl.store(lse + to, logs * LN2, mask=wanted)
        gl.store(partial + to[:, None] * SIZE + dim, result, mask=wanted[:, None])
    else:
        to = out + (token * out_stride + head * out_head)[:, None] + dim
        gl.store(to, result.to(out.dtype.element_ty), mask=wanted[:, None])


@gluon.jit(do_not_specialize=["splits"])
def attend_paged(
    query: gl.tensor,
    key: gl.tensor,
    value: gl.tensor,
    out: gl.tensor,
    partial: gl.tensor,
    lse: gl.tensor,
    work: gl.tensor,
    schedule: gl.tensor,
    slots: gl.tensor,
    kpos: gl.tensor,
    rope_shift: gl.tensor,
    shown: gl.tensor,
    cos_sin: gl.tensor,
    qpos: gl.tensor,
    scale: gl.tensor,
    query_stride: gl.tensor,
    query_head: gl.tensor,
    out_stride: gl.tensor,
    out_head: gl.tensor,
    block_stride: gl.tensor,
    slot_stride: gl.tensor,
    head_stride: gl.tensor,
    kv_heads: gl.tensor,
    splits: gl.tensor,
    SIZE: gl.constexpr,
    GROUP: gl.constexpr,
    PADDED: gl.constexpr,
    SPLIT: gl.constexpr,
    FLAT: gl.constexpr,
) -> None:
    """Attention of the queries that `work` names; grid (KV heads, n), 4 warps.

    `work` [n, 7] int32 is `TileSchedule.work` and `schedule` int32 its key tiles. `slots` and
    `kpos` [tiles, 128] int32 are the tiles' cache slots (-1: hidden) and logical positions,
    `rope_shift` and `shown` [tiles] int32 by how much the queries are rotated back and how many
    keys are visible. `qpos` [queries] int32 are the queries' logical positions. `scale` includes
    log2(e). With SPLIT, outputs and log-sum-exps of split s of query i go to `partial` [queries *
    splits, heads, SIZE] and `lse` [queries * splits, heads], float32, at i * splits + s; without,
    outputs go to `out`. FLAT: all slots of the cache are one row of equal strides.
    """
    kv_head = gl.program_id(0)
    work += gl.program_id(1) * 7
    first = gl.load(work)
    queries = gl.load(work + 1)
    schedule += gl.load(work + 2)
    masked = gl.load(work + 3)
    own = gl.load(work + 4)
    count = gl.load(work + 5)
    split = gl.load(work + 6)
    dtype: gl.constexpr = query.dtype.element_ty
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, SIZE], dtype)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    k_smem = gl.allocate_shared_memory(dtype, [2, TILE, SIZE], tile)
    v_smem = gl.allocate_shared_memory(dtype, [2, TILE, SIZE], tile)
    q_smem = gl.allocate_shared_memory(dtype, [2, SIDE, SIZE], tile)
    q_rotated = gl.allocate_shared_memory(dtype, [4, SIDE, SIZE], tile)
    q_ready = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    q_free = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    k_ready = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    k_free = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    v_ready = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    v_free = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    for i in gl.static_range(2):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_free.index(i), count=2)
        mbarrier.init(k_ready.index(i), count=128)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_ready.index(i), count=128)
        mbarrier.init(v_free.index(i), count=2)
    tiles = (schedule, rope_shift, shown, kpos)
    rotated = (q_rotated, q_ready, q_free)
    keys = (k_smem, k_ready, k_free)
    values = (v_smem, v_ready, v_free)
    key += kv_head * head_stride
    value += kv_head * head_stride
    heads = kv_heads * GROUP
    step = (out, partial, lse, tiles, qpos, first, queries, kv_head, masked)
    rest = (count, split, splits, scale, out_stride, out_head, heads, rotated, keys, values)
    early: gl.constexpr = 0
    late: gl.constexpr = 1
    gl.warp_specialize(
        [
            (
                load_tiles,
                (
                    key, value, slots, schedule, count, block_stride, slot_stride, keys, values,
                    SIZE, FLAT,
                ),
            ),
            (_attend, (step, own, rest, early, SIZE, GROUP, PADDED, SPLIT)),
            (_attend, (step, count, rest, late, SIZE, GROUP, PADDED, SPLIT)),
            (
                rotate_queries,
                (
                    query, cos_sin, schedule, rope_shift, first, queries, kv_head, count,
                    query_stride, query_head, q_smem, rotated, SIZE, GROUP, PADDED,
                ),
            ),
        ],
        [4, 4, 4],
        [_ATTENDING, _ATTENDING, _ROTATING],
    )  # fmt: skip
