"""Attention of tiles of queries that walk over paged keys which rest rotated (Gluon, Hopper).

A program serves one KV head and 128 rows of queries (tokens times packed heads), and visits tiles
of 128 keys that share a turn. Four groups of warps run side by side: one copies keys and values
from their pages and one turns the queries back for the next tile whose turn differs, since
<q, R(t) k> = <R(-t) q, k> (both in `walk_feed`); two attend, 64 rows each, with the scores of a
tile multiplied while the weights of the tile before are (FlashAttention-3, Shah et al., arXiv
2407.08608, section 3.2).

The two attending groups share no barrier but the buffers': eight warps of one group took 1.3 times
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

from picbench.kernels.cuda.prefill.paged.hopper_load import (
    NO_TURN,
    SIDE,
    TILE,
    load_tiles,
    turn_queries,
)
from picbench.kernels.cuda.prefill.paged.key_tiles import LOOSE

# Registers of a thread that attends, and of one that turns; those that copy get as many as the
# latter. All 512 threads share 65,536.
_ATTENDING, _TURNING = gl.constexpr(216), gl.constexpr(40)

_LOOSE = gl.constexpr(LOOSE)
_LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _softmax(  # type: ignore[no-untyped-def]
    scores: gl.tensor, highest: gl.tensor, total: gl.tensor, scale: gl.tensor
):
    """One step of the running softmax in base 2; `scale` includes log2(e)."""
    peak = gl.maximum(highest, gl.max(scores, 1) * scale)
    safe = gl.where(peak == float("-inf"), 0.0, peak)
    weight = gl.exp2(scores * scale - safe[:, None])
    fade = gl.exp2(highest - safe)
    return peak, total * fade + gl.sum(weight, 1), weight, fade


@gluon.jit
def _hide(  # type: ignore[no-untyped-def]
    scores: gl.tensor,
    kpos: gl.tensor,
    tile: gl.tensor,
    sees: gl.tensor,
    shown: gl.tensor,
    MASKED: gl.constexpr,
):
    """Hides keys behind each row's position, or those behind the first `shown`."""
    lane = gl.arange(0, TILE, layout=gl.SliceLayout(0, scores.type.layout))
    if MASKED:
        seen = gl.load(kpos + tile * TILE + lane)[None, :] <= sees[:, None]
    else:
        # The compiler knows which registers hold the first lanes, and leaves them alone.
        seen = ((lane < TILE - _LOOSE) | (lane < shown))[None, :]
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def _change(  # type: ignore[no-untyped-def]
    turn: gl.tensor,
    next_turn: gl.tensor,
    change: gl.tensor,
    q_ready: gl.shared_memory_descriptor,
    q_free: gl.shared_memory_descriptor,
):
    """Leaves the queries of the last turn and waits for those of the next, if they differ."""
    if next_turn != turn:
        if change >= 0:
            mbarrier.arrive(q_free.index(change & 1), count=1)
        change += 1
        mbarrier.wait(q_ready.index(change & 1), (change >> 1) & 1)
    return change


@gluon.jit
def _walk(  # type: ignore[no-untyped-def]
    begin: gl.tensor,
    end: gl.tensor,
    state: gl.tuple,
    tiles: gl.tuple,
    sees: gl.tensor,
    scale: gl.tensor,
    zero: gl.tensor,
    turned: gl.tuple,
    keys: gl.tuple,
    values: gl.tuple,
    HALF: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Attends to the visits begin .. end, of which there is one at least; returns the state."""
    joint, highest, total, turn, change = state
    visits, turns, shown, kpos = tiles
    q_turned, q_ready, q_free = turned
    k_smem, k_ready, k_free = keys
    v_smem, v_ready, v_free = values
    weights: gl.constexpr = gl.DotOperandLayout(0, joint.type.layout, 2)
    rows: gl.constexpr = gl.SliceLayout(1, joint.type.layout)
    dtype: gl.constexpr = q_turned.dtype
    tile = gl.load(visits + begin)
    next_turn = gl.load(turns + tile)
    change = _change(turn, next_turn, change, q_ready, q_free)
    turn = next_turn
    stage = begin & 1
    mbarrier.wait(k_ready.index(stage), (begin >> 1) & 1)
    own = q_turned.index((change & 1) * 2 + HALF)
    k = k_smem.index(stage).permute((1, 0))
    product = warpgroup_mma(own, k, zero, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, [product])
    mbarrier.arrive(k_free.index(stage), count=1)
    scores = _hide(scores, kpos, tile, sees, gl.load(shown + tile), MASKED)
    highest, total, weight, fade = _softmax(scores, highest, total, scale)
    joint = joint * gl.convert_layout(fade, rows)[:, None]
    p = gl.convert_layout(weight.to(dtype), weights)
    tile = gl.load(visits + gl.minimum(begin + 1, end - 1))
    next_turn = gl.load(turns + tile)
    next_shown = gl.load(shown + tile)
    ahead = gl.load(visits + gl.minimum(begin + 2, end - 1))
    for i in range(begin + 1, end):
        change = _change(turn, next_turn, change, q_ready, q_free)
        turn = next_turn
        own_shown = next_shown
        own_tile = tile
        tile = ahead
        next_turn = gl.load(turns + tile)
        next_shown = gl.load(shown + tile)
        ahead = gl.load(visits + gl.minimum(i + 2, end - 1))
        stage = i & 1
        back = stage ^ 1
        mbarrier.wait(k_ready.index(stage), (i >> 1) & 1)
        own = q_turned.index((change & 1) * 2 + HALF)
        k = k_smem.index(stage).permute((1, 0))
        product = warpgroup_mma(own, k, zero, use_acc=False, is_async=True)
        mbarrier.wait(v_ready.index(back), ((i - 1) >> 1) & 1)
        sums = warpgroup_mma(p, v_smem.index(back), joint, is_async=True)
        scores = warpgroup_mma_wait(1, [product])
        mbarrier.arrive(k_free.index(stage), count=1)
        scores = _hide(scores, kpos, own_tile, sees, own_shown, MASKED)
        highest, total, weight, fade = _softmax(scores, highest, total, scale)
        joint = warpgroup_mma_wait(0, [sums])
        mbarrier.arrive(v_free.index(back), count=1)
        joint = joint * gl.convert_layout(fade, rows)[:, None]
        p = gl.convert_layout(weight.to(dtype), weights)
    back = (end - 1) & 1
    mbarrier.wait(v_ready.index(back), ((end - 1) >> 1) & 1)
    sums = warpgroup_mma(p, v_smem.index(back), joint, is_async=True)
    joint = warpgroup_mma_wait(0, [sums])
    mbarrier.arrive(v_free.index(back), count=1)
    return joint, highest, total, turn, change


@gluon.jit
def _attend(  # type: ignore[no-untyped-def]
    out: gl.tensor,
    partial: gl.tensor,
    lse: gl.tensor,
    tiles: gl.tuple,
    qpos: gl.tensor,
    first: gl.tensor,
    queries: gl.tensor,
    kv_head: gl.tensor,
    masked: gl.tensor,
    own: gl.tensor,
    count: gl.tensor,
    part: gl.tensor,
    parts: gl.tensor,
    scale: gl.tensor,
    out_stride: gl.tensor,
    out_head: gl.tensor,
    heads: gl.tensor,
    turned: gl.tuple,
    keys: gl.tuple,
    values: gl.tuple,
    HALF: gl.constexpr,
    SIZE: gl.constexpr,
    GROUP: gl.constexpr,
    PADDED: gl.constexpr,
    CUT: gl.constexpr,
):
    """Attends with one half of the rows to its `own` visits, the first `masked` with a mask."""
    _, q_ready, q_free = turned
    _, k_ready, k_free = keys
    _, v_ready, v_free = values
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    row = gl.arange(0, SIDE, layout=gl.SliceLayout(1, s_layout))
    token = HALF * (SIDE // PADDED) + row // PADDED
    wanted = (token < queries) & (row % PADDED < GROUP)
    sees = gl.load(qpos + first + token, mask=wanted, other=-1)
    highest = gl.full([SIDE], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
    total = gl.zeros([SIDE], gl.float32, gl.SliceLayout(1, s_layout))
    joint = gl.zeros([SIDE, SIZE], gl.float32, o_layout)
    zero = gl.zeros([SIDE, TILE], gl.float32, s_layout)
    visits, turns, _, _ = tiles
    turn = NO_TURN
    change = -1
    if masked > 0:
        joint, highest, total, turn, change = _walk(
            0, masked, (joint, highest, total, turn, change), tiles, sees, scale, zero,
            turned, keys, values, HALF, True,
        )  # fmt: skip
    if masked < own:
        joint, highest, total, turn, change = _walk(
            masked, own, (joint, highest, total, turn, change), tiles, sees, scale, zero,
            turned, keys, values, HALF, False,
        )  # fmt: skip
    # The other half goes on: its buffers are given back for both.
    for i in range(own, count):
        next_turn = gl.load(turns + gl.load(visits + i))
        change = _change(turn, next_turn, change, q_ready, q_free)
        turn = next_turn
        mbarrier.wait(k_ready.index(i & 1), (i >> 1) & 1)
        mbarrier.arrive(k_free.index(i & 1), count=1)
        mbarrier.wait(v_ready.index(i & 1), (i >> 1) & 1)
        mbarrier.arrive(v_free.index(i & 1), count=1)

    sums = gl.convert_layout(total, gl.SliceLayout(1, o_layout))
    some = sums > 0.0
    nonzero = gl.where(some, sums, 1.0)
    result = joint * (1.0 / nonzero)[:, None]
    row = gl.arange(0, SIDE, layout=gl.SliceLayout(1, o_layout))
    dim = gl.arange(0, SIZE, layout=gl.SliceLayout(0, o_layout))[None, :]
    token = HALF * (SIDE // PADDED) + row // PADDED
    wanted = (token < queries) & (row % PADDED < GROUP)
    head = kv_head * GROUP + row % PADDED
    token = (first + token).to(gl.int64)
    if CUT:
        to = (token * parts + part) * heads + head
        peak = gl.convert_layout(highest, gl.SliceLayout(1, o_layout))
        logs = gl.where(some, peak + gl.log2(nonzero), float("-inf"))
        gl.store(lse + to, logs * _LN2, mask=wanted)
        gl.store(partial + to[:, None] * SIZE + dim, result, mask=wanted[:, None])
    else:
        to = out + (token * out_stride + head * out_head)[:, None] + dim
        gl.store(to, result.to(out.dtype.element_ty), mask=wanted[:, None])


@gluon.jit(do_not_specialize=["parts"])
def attend_walk(
    query: gl.tensor,
    key: gl.tensor,
    value: gl.tensor,
    out: gl.tensor,
    partial: gl.tensor,
    lse: gl.tensor,
    work: gl.tensor,
    visits: gl.tensor,
    slots: gl.tensor,
    kpos: gl.tensor,
    turns: gl.tensor,
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
    parts: gl.tensor,
    SIZE: gl.constexpr,
    GROUP: gl.constexpr,
    PADDED: gl.constexpr,
    CUT: gl.constexpr,
    FLAT: gl.constexpr,
) -> None:
    """Attention of the queries that `work` [n, 7] int32 names; grid (KV heads, n), 4 warps.

    A row of `work` is the first query, the count of queries, the first visit, the counts of visits
    that need a mask, of those that the first half of the rows makes and of all, and the number of
    the part. `visits` int32 are tiles of keys: `slots` and `kpos` [tiles, 128] int32 are their
    cache slots (-1: hidden) and logical positions, `turns` and `shown` [tiles] int32 how far the
    queries are turned back and how many keys are not hidden. Query i stands at qpos[i], int32.
    `scale` includes log2(e). If CUT, outputs and log-sum-exps of part p of query i go to
    `partial` and `lse` [queries * parts, heads, SIZE], float32, else to `out`. FLAT: the slots of
    all blocks are one row of equal strides.
    """
    kv_head = gl.program_id(0)
    work += gl.program_id(1) * 7
    first = gl.load(work)
    queries = gl.load(work + 1)
    visits += gl.load(work + 2)
    masked = gl.load(work + 3)
    own = gl.load(work + 4)
    count = gl.load(work + 5)
    part = gl.load(work + 6)
    dtype: gl.constexpr = query.dtype.element_ty
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, SIZE], dtype)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    k_smem = gl.allocate_shared_memory(dtype, [2, TILE, SIZE], tile)
    v_smem = gl.allocate_shared_memory(dtype, [2, TILE, SIZE], tile)
    q_smem = gl.allocate_shared_memory(dtype, [2, SIDE, SIZE], tile)
    q_turned = gl.allocate_shared_memory(dtype, [4, SIDE, SIZE], tile)
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
    tiles = (visits, turns, shown, kpos)
    turned = (q_turned, q_ready, q_free)
    keys = (k_smem, k_ready, k_free)
    values = (v_smem, v_ready, v_free)
    key += kv_head * head_stride
    value += kv_head * head_stride
    heads = kv_heads * GROUP
    early: gl.constexpr = 0
    late: gl.constexpr = 1
    gl.warp_specialize(
        [
            (
                load_tiles,
                (
                    key, value, slots, visits, count, block_stride, slot_stride, keys, values,
                    SIZE, FLAT,
                ),
            ),
            (
                _attend,
                (
                    out, partial, lse, tiles, qpos, first, queries, kv_head, masked, own, count,
                    part, parts, scale, out_stride, out_head, heads, turned, keys, values, early,
                    SIZE, GROUP, PADDED, CUT,
                ),
            ),
            (
                _attend,
                (
                    out, partial, lse, tiles, qpos, first, queries, kv_head, masked, count, count,
                    part, parts, scale, out_stride, out_head, heads, turned, keys, values, late,
                    SIZE, GROUP, PADDED, CUT,
                ),
            ),
            (
                turn_queries,
                (
                    query, cos_sin, visits, turns, first, queries, kv_head, count, query_stride,
                    query_head, q_smem, turned, SIZE, GROUP, PADDED,
                ),
            ),
        ],
        [4, 4, 4],
        [_ATTENDING, _ATTENDING, _TURNING],
    )  # fmt: skip
