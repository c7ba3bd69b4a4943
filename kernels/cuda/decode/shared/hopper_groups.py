"""Attention of groups of readers on Hopper: `group_attention.attend_groups` in Gluon.

A program takes cells of one KV head, one after another. Four warp groups run side by side: one
copies the keys and values of its cells through a ring of buffers, three attend with 64 query rows
each, to the same buffers. So a cell that 48 readers of four heads see is loaded once. A warp group
without readers only releases the buffers, and the product with the keys of a tile runs while the
softmax of the tile before it is computed (FlashAttention-3, Shah et al., arXiv 2407.08608, section
3.2). Which cells a program takes depends on their number alone: warp groups need not agree on it,
and load what the next cell's queries depend on ahead of time.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from picbench.kernels.cuda.base_two import LN2
from picbench.kernels.cuda.decode.hopper_tiles import KEYS, copy_tile, tile_blocks
from picbench.kernels.cuda.decode.shared.group_rows import PASSES, ROWS

#: Query rows of one warp group, and warp groups that attend.
SIDE, SIDES = gl.constexpr(ROWS), gl.constexpr(PASSES)
# Registers of a thread that attends; 128 threads that copy share what is left of 65,536.
_ATTENDING = gl.constexpr(152)


@gluon.jit
def _load_cells(
    key: gl.tensor,
    value: gl.tensor,
    groups: gl.tensor,
    units: gl.tensor,
    block_stride: gl.tensor,
    slot_stride: gl.tensor,
    head_stride: gl.tensor,
    keys: gl.tuple,
    values: gl.tuple,
    WIDTH: gl.constexpr,
    KV_HEADS: gl.constexpr,
    HEAD: gl.constexpr,
    CELL: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Copies the keys and values of every tile of the program's cells.

    `keys` and `values` are STAGES buffers [KEYS, HEAD] each and their barriers: ready, free.
    """
    k_smem, k_ready, k_free = keys
    v_smem, v_ready, v_free = values
    across: gl.constexpr = HEAD // 8
    spread: gl.constexpr = gl.BlockedLayout(
        [1, across // 2, 8], [1, 32 // across, across], [4, 1, 1], [2, 1, 0]
    )
    listed: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, spread))
    done = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        group = groups + (unit // KV_HEADS).to(gl.int64) * WIDTH
        kv_head = unit % KV_HEADS
        own_key = key + kv_head * head_stride
        own_value = value + kv_head * head_stride
        tiles = gl.cdiv(gl.load(group) * 16, KEYS)
        block, bits = tile_blocks(group + 2, group + 2 + CELL, 0, tiles, listed)
        for tile in range(tiles):
            stage = done % STAGES
            phase = (done // STAGES) & 1
            next_block, next_bits = tile_blocks(
                group + 2, group + 2 + CELL, tile + 1, tiles, listed
            )
            mbarrier.wait(k_free.index(stage), phase ^ 1)
            copy_tile(
                k_smem.index(stage), own_key, block, bits, block_stride, slot_stride, HEAD, spread
            )
            async_copy.mbarrier_arrive(k_ready.index(stage), increment_count=False)
            mbarrier.wait(v_free.index(stage), phase ^ 1)
            copy_tile(
                v_smem.index(stage), own_value, block, bits, block_stride, slot_stride, HEAD, spread
            )
            async_copy.mbarrier_arrive(v_ready.index(stage), increment_count=False)
            block, bits = next_block, next_bits
            done += 1


@gluon.jit
def _cell_of(  # type: ignore[no-untyped-def]
    groups: gl.tensor,
    unit: gl.tensor,
    units: gl.tensor,
    WIDTH: gl.constexpr,
    KV_HEADS: gl.constexpr,
):
    """The readers and the tiles of a unit, those of the last one after it."""
    group = groups + (gl.minimum(unit, units - 1) // KV_HEADS).to(gl.int64) * WIDTH
    return gl.load(group + 1), gl.cdiv(gl.load(group) * 16, KEYS)


@gluon.jit
def _readers_of(  # type: ignore[no-untyped-def]
    groups: gl.tensor,
    unit: gl.tensor,
    units: gl.tensor,
    side: gl.tensor,
    WIDTH: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    CELL: gl.constexpr,
    READERS: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Of the rows [SIDE] of one side of a unit: requests' rows, -1 for none; shifts; parts."""
    per_side: gl.constexpr = SIDE // GROUP
    group = groups + (gl.minimum(unit, units - 1) // KV_HEADS).to(gl.int64) * WIDTH
    member = gl.arange(0, SIDE, layout=LAYOUT)
    reader = side * per_side + member // GROUP
    inside = (member < per_side * GROUP) & (reader < gl.load(group + 1))
    at = group + 2 + 3 * CELL + reader
    row = gl.load(at, mask=inside, other=-1)
    shift = gl.load(at + READERS, mask=inside, other=0)
    return row, shift, gl.load(at + 2 * READERS, mask=inside, other=0)


@gluon.jit
def _rotate_queries(
    query: gl.tensor,
    cos_sin: gl.tensor,
    index: gl.tensor,
    shift: gl.tensor,
    kv_head: gl.tensor,
    scale: gl.tensor,
    query_stride: gl.tensor,
    q_smem: gl.shared_memory_descriptor,
    HEAD: gl.constexpr,
    GROUP: gl.constexpr,
    PAIRED: gl.constexpr,
) -> None:
    """Writes the rows' queries, scaled and rotated by the opposite of their readers' shifts."""
    half: gl.constexpr = HEAD // 2
    asks = (index >= 0)[:, None]
    member = gl.arange(0, SIDE, layout=gl.SliceLayout(1, PAIRED))
    dim = gl.arange(0, half, layout=gl.SliceLayout(0, PAIRED))[None, :]
    row = index.to(gl.int64) * query_stride + (kv_head * GROUP + member % GROUP) * HEAD
    at = query + gl.multiple_of(row, 8)[:, None] + dim
    angle = cos_sin + (gl.abs(shift).to(gl.int64) * HEAD)[:, None] + dim
    low = gl.load(at, mask=asks, other=0.0)
    high = gl.load(at + half, mask=asks, other=0.0)
    cos = gl.load(angle).to(gl.float32)
    sin = gl.load(angle + half).to(gl.float32)
    sin = gl.where((shift < 0)[:, None], -sin, sin)
    low, high = low.to(gl.float32) * scale, high.to(gl.float32) * scale
    q_smem.slice(0, half, dim=1).store((low * cos + high * sin).to(q_smem.dtype))
    q_smem.slice(half, half, dim=1).store((high * cos - low * sin).to(q_smem.dtype))
    fence_async_shared()


@gluon.jit
def _seen_words(  # type: ignore[no-untyped-def]
    bits: gl.tensor, tile: gl.tensor, last: gl.tensor
):
    """The visible keys of a tile as the bits of two words; those of the last tile after it."""
    at = bits + gl.minimum(tile, last - 1) * 4
    low = gl.load(at) | (gl.load(at + 1) << 16)
    return low, gl.load(at + 2) | (gl.load(at + 3) << 16)


@gluon.jit
def _softmax(  # type: ignore[no-untyped-def]
    scores: gl.tensor,
    low: gl.tensor,
    high: gl.tensor,
    row_max: gl.tensor,
    row_sum: gl.tensor,
):
    """One step of the online softmax in base 2 over the keys whose bits are set.

    Returns the new maxima and sums [SIDE], the weights [SIDE, KEYS], the factor of older ones.
    """
    lane = gl.arange(0, KEYS, layout=gl.SliceLayout(0, scores.type.layout))
    word = gl.where(lane < 32, low, high)
    seen = ((word >> (lane % 32)) & 1) != 0
    scores = gl.where(seen[None, :], scores, float("-inf"))
    peak = gl.maximum(row_max, gl.max(scores, 1))
    safe = gl.where(peak == float("-inf"), 0.0, peak)
    weight = gl.exp2(scores - safe[:, None])
    rescale = gl.exp2(row_max - safe)
    return peak, row_sum * rescale + gl.sum(weight, 1), weight, rescale


@gluon.jit
def _attend_cell(  # type: ignore[no-untyped-def]
    bits: gl.tensor,
    tiles: gl.tensor,
    done: gl.tensor,
    q_smem: gl.shared_memory_descriptor,
    keys: gl.tuple,
    values: gl.tuple,
    HEAD: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Attends with the queries of one warp group to the tiles of a cell, at least one.

    Returns `acc` [SIDE, HEAD], `row_max` and `row_sum` [SIDE], float32. `done` tiles were before.
    """
    k_smem, k_ready, k_free = keys
    v_smem, v_ready, v_free = values
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD, 16])
    weights: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    dtype: gl.constexpr = q_smem.dtype
    zero = gl.zeros([SIDE, KEYS], gl.float32, s_layout)
    acc = gl.zeros([SIDE, HEAD], gl.float32, o_layout)
    row_max = gl.full([SIDE], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
    row_sum = gl.zeros([SIDE], gl.float32, gl.SliceLayout(1, s_layout))
    low, high = _seen_words(bits, 0, tiles)
    stage = done % STAGES
    mbarrier.wait(k_ready.index(stage), (done // STAGES) & 1)
    product = warpgroup_mma(
        q_smem, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
    )
    next_low, next_high = _seen_words(bits, 1, tiles)
    scores = warpgroup_mma_wait(0, [product])
    mbarrier.arrive(k_free.index(stage), count=1)
    row_max, row_sum, weight, rescale = _softmax(scores, low, high, row_max, row_sum)
    p = gl.convert_layout(weight.to(dtype), weights)
    for tile in range(1, tiles):
        back = stage
        back_phase = ((done + tile - 1) // STAGES) & 1
        stage = (done + tile) % STAGES
        low, high = next_low, next_high
        next_low, next_high = _seen_words(bits, tile + 1, tiles)
        mbarrier.wait(k_ready.index(stage), ((done + tile) // STAGES) & 1)
        product = warpgroup_mma(
            q_smem, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        mbarrier.wait(v_ready.index(back), back_phase)
        next_acc = warpgroup_mma(p, v_smem.index(back), acc, is_async=True)
        scores = warpgroup_mma_wait(1, [product])
        mbarrier.arrive(k_free.index(stage), count=1)
        row_max, row_sum, weight, rescale = _softmax(scores, low, high, row_max, row_sum)
        acc = warpgroup_mma_wait(0, [next_acc])
        mbarrier.arrive(v_free.index(back), count=1)
        acc = acc * gl.convert_layout(rescale, rows)[:, None]
        p = gl.convert_layout(weight.to(dtype), weights)
    mbarrier.wait(v_ready.index(stage), ((done + tiles - 1) // STAGES) & 1)
    next_acc = warpgroup_mma(p, v_smem.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, [next_acc])
    mbarrier.arrive(v_free.index(stage), count=1)
    return acc, row_max, row_sum


@gluon.jit
def _store_parts(
    acc: gl.tensor,
    row_max: gl.tensor,
    row_sum: gl.tensor,
    index: gl.tensor,
    part: gl.tensor,
    kv_head: gl.tensor,
    parts: gl.tensor,
    part_lse: gl.tensor,
    q_smem: gl.shared_memory_descriptor,
    HEADS: gl.constexpr,
    HEAD: gl.constexpr,
    GROUP: gl.constexpr,
    PAIRED: gl.constexpr,
) -> None:
    """Stores a side's outputs and log-sum-exps, by way of the buffer of its queries.

    From there a thread stores 16 bytes at a time; the product left four in each.
    """
    half: gl.constexpr = HEAD // 2
    some = row_sum > 0.0
    nonzero = gl.where(some, row_sum, 1.0)
    logs = gl.where(some, (row_max + gl.log2(nonzero)) * LN2, float("-inf"))
    share = gl.convert_layout(1.0 / nonzero, gl.SliceLayout(1, acc.type.layout))
    q_smem.store((acc * share[:, None]).to(q_smem.dtype))
    rows: gl.constexpr = gl.SliceLayout(1, PAIRED)
    member = gl.arange(0, SIDE, layout=rows)
    to = part.to(gl.int64) * HEADS + kv_head * GROUP + member % GROUP
    gl.store(part_lse + to, gl.convert_layout(logs, rows), mask=index >= 0)
    dim = gl.arange(0, half, layout=gl.SliceLayout(0, PAIRED))[None, :]
    at = parts + gl.multiple_of(to * HEAD, 8)[:, None] + dim
    asks = (index >= 0)[:, None]
    gl.store(at, q_smem.slice(0, half, dim=1).load(PAIRED), mask=asks)
    gl.store(at + half, q_smem.slice(half, half, dim=1).load(PAIRED), mask=asks)


@gluon.jit
def _attend_cells(
    inputs: gl.tuple,
    MEMBER: gl.constexpr,
    WIDTH: gl.constexpr,
    HEADS: gl.constexpr,
    HEAD: gl.constexpr,
    GROUP: gl.constexpr,
    CELL: gl.constexpr,
    READERS: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Warp group MEMBER over all cells of the program; `inputs` are named below.

    A cell's sides go to the warp groups whose turn it is. One that has none prepares the queries of
    the next cell while the others attend to this one.
    """
    query, groups, place, units, cos_sin, parts, part_lse, scale, query_stride, buffers = inputs
    q_smem, keys, values = buffers
    k_ready, k_free = keys[1], keys[2]
    v_ready, v_free = values[1], values[2]
    kv_heads: gl.constexpr = HEADS // GROUP
    half: gl.constexpr = HEAD // 2
    per_side: gl.constexpr = SIDE // GROUP
    paired: gl.constexpr = gl.BlockedLayout([1, 8], [256 // half, half // 8], [4, 1], [1, 0])
    layout: gl.constexpr = gl.SliceLayout(1, paired)
    q_own = q_smem.index(MEMBER)
    first = gl.program_id(0)
    step = gl.num_programs(0)
    done = 0
    side = MEMBER + 0 * first
    if first < units:
        readers, tiles = _cell_of(groups, first, units, WIDTH, kv_heads)
        row, shift, part = _readers_of(
            groups, first, units, side, WIDTH, kv_heads, GROUP, CELL, READERS, layout
        )
        index = gl.load(place + row, mask=row >= 0, other=-1)
        for unit in range(first, units, step):
            group = groups + (unit // kv_heads).to(gl.int64) * WIDTH
            kv_head = unit % kv_heads
            # What the next cell's queries depend on is on its way while this one is attended to.
            next_side = (side + SIDES - gl.cdiv(readers, per_side) % SIDES) % SIDES
            next_readers, next_tiles = _cell_of(groups, unit + step, units, WIDTH, kv_heads)
            next_row, next_shift, next_part = _readers_of(
                groups, unit + step, units, next_side, WIDTH, kv_heads, GROUP, CELL, READERS, layout
            )
            if side * per_side < readers:
                _rotate_queries(
                    query, cos_sin, index, shift, kv_head, scale, query_stride, q_own, HEAD, GROUP,
                    paired,
                )  # fmt: skip
                next_index = gl.load(place + next_row, mask=next_row >= 0, other=-1)
                acc, row_max, row_sum = _attend_cell(
                    group + 2 + CELL, tiles, done, q_own, keys, values, HEAD, STAGES
                )
                _store_parts(
                    acc, row_max, row_sum, index, part, kv_head, parts, part_lse, q_own, HEADS,
                    HEAD, GROUP, paired,
                )  # fmt: skip
            else:
                next_index = gl.load(place + next_row, mask=next_row >= 0, other=-1)
                # The buffers are released for all warp groups.
                for tile in range(done, done + tiles):
                    stage = tile % STAGES
                    phase = (tile // STAGES) & 1
                    mbarrier.wait(k_ready.index(stage), phase)
                    mbarrier.arrive(k_free.index(stage), count=1)
                    mbarrier.wait(v_ready.index(stage), phase)
                    mbarrier.arrive(v_free.index(stage), count=1)
            done += tiles
            index, shift, part = next_index, next_shift, next_part
            readers, tiles, side = next_readers, next_tiles, next_side


@gluon.jit
def attend_groups_hopper(
    query: gl.tensor,
    key: gl.tensor,
    value: gl.tensor,
    groups: gl.tensor,
    control: gl.tensor,
    place: gl.tensor,
    cos_sin: gl.tensor,
    parts: gl.tensor,
    part_lse: gl.tensor,
    scale: gl.tensor,
    query_stride: gl.tensor,
    block_stride: gl.tensor,
    slot_stride: gl.tensor,
    head_stride: gl.tensor,
    WIDTH: gl.constexpr,
    HEADS: gl.constexpr,
    HEAD: gl.constexpr,
    GROUP: gl.constexpr,
    CELL: gl.constexpr,
    READERS: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Partial attention as `attend_groups`, with its arguments but the counter; 4 warps.

    Grid: as many programs as there are multiprocessors. For keys cached with RoPE and heads of 64
    or 128 dimensions, all of them rotated, in half precision; READERS is at most SIDES times
    SIDE // GROUP, and `parts` has the queries' type.
    """
    dtype: gl.constexpr = query.dtype.element_ty
    kv_heads: gl.constexpr = HEADS // GROUP
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, HEAD], dtype)
    side: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SIDE, HEAD], dtype)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(dtype, [SIDES, SIDE, HEAD], side)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, KEYS, HEAD], tile)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, KEYS, HEAD], tile)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=128)
        mbarrier.init(k_free.index(i), count=SIDES)
        mbarrier.init(v_ready.index(i), count=128)
        mbarrier.init(v_free.index(i), count=SIDES)
    keys = (k_smem, k_ready, k_free)
    values = (v_smem, v_ready, v_free)
    units = gl.load(control) * kv_heads
    buffers = (q_smem, keys, values)
    inputs = (query, groups, place, units, cos_sin, parts, part_lse, scale, query_stride, buffers)
    first: gl.constexpr = 0
    second: gl.constexpr = 1
    third: gl.constexpr = 2
    gl.warp_specialize(
        [
            (
                _load_cells,
                (
                    key, value, groups, units, block_stride, slot_stride, head_stride, keys, values,
                    WIDTH, kv_heads, HEAD, CELL, STAGES,
                ),
            ),
            (_attend_cells, (inputs, first, WIDTH, HEADS, HEAD, GROUP, CELL, READERS, STAGES)),
            (_attend_cells, (inputs, second, WIDTH, HEADS, HEAD, GROUP, CELL, READERS, STAGES)),
            (_attend_cells, (inputs, third, WIDTH, HEADS, HEAD, GROUP, CELL, READERS, STAGES)),
        ],
        [4, 4, 4],
        [_ATTENDING, _ATTENDING, _ATTENDING],
    )  # fmt: skip
