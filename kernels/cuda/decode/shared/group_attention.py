"""Attention of all requests that see the same cell, over one load of its keys and values (Triton).

A program takes a group of readers and a KV head: the queries of all readers and of all query heads
of the KV head are the rows of one product, each rotated by the opposite of its reader's RoPE shift.
So what is read once a request elsewhere is read once a group here. Each reader's partial output and
log-sum-exp go to rows of their own, which `merge_groups` joins with those of `split_kv`.

Programs take work from a counter until none is left, so the grid depends on the device alone, and a
CUDA graph may be replayed for other groups. `merge_groups` resets the counter.

Keys cached without RoPE are rotated by their places in the chunk, which all readers have in common,
and queries by the place of the chunk in each request: since they were rotated by their logical
positions before, <R(p - s) q, R(j) k> = <R(p) q, R(s + j) k>.
"""

import triton
import triton.language as tl

from picbench.kernels.cuda.base_two import LN2
from picbench.kernels.cuda.decode.split_kv import softmax_step
from picbench.kernels.cuda.pairing import pairs


@triton.jit
def _rotated(  # type: ignore[no-untyped-def]
    low: tl.tensor, high: tl.tensor, angle: tl.tensor, rotates: tl.tensor, ROTARY: tl.constexpr
):
    """Halves [HEAD / 2, keys] of keys, rotated by the angles at these places of the table."""
    cos = tl.load(angle, mask=rotates, other=1.0).to(tl.float32)
    sin = tl.load(angle + ROTARY // 2, mask=rotates, other=0.0).to(tl.float32)
    return (low * cos - high * sin).to(low.dtype), (high * cos + low * sin).to(low.dtype)


@triton.jit
def _keys_of(  # type: ignore[no-untyped-def]
    group: tl.tensor, tile: tl.tensor, tiles: tl.tensor, CELL: tl.constexpr, KEYS: tl.constexpr
):
    """Of each key of a tile: its block, its place in the chunk, and whether it is visible.

    Reading ahead ends at the last tile, which is then returned again.
    """
    lane = tl.arange(0, KEYS)
    at = group + 2 + tl.minimum(tile, tiles - 1) * (KEYS // 16) + lane // 16
    seen = tl.load(at + CELL) >> (lane % 16)
    offset = tl.load(at + 2 * CELL) + lane % 16
    return tl.load(at), offset, (seen & 1) != 0


@triton.jit
def _attend_readers(
    tensors: tl.tuple,
    group: tl.tensor,
    scale: tl.tensor,
    kv_head: tl.tensor,
    first: tl.tensor,
    readers: tl.tensor,
    strides: tl.tuple,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    CELL: tl.constexpr,
    READERS: tl.constexpr,
    ROTARY: tl.constexpr,
    NEOX: tl.constexpr,
    KEYS: tl.constexpr,
    UNROTATED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """The readers from `first` on whose queries fit ROWS, over the cell of `group`."""
    query, key, value, place, cos_sin, parts, part_lse = tensors
    query_stride, block_stride, slot_stride, head_stride = strides
    member = tl.arange(0, ROWS)
    reader = first + member // GROUP
    inside = (member < ROWS // GROUP * GROUP) & (reader < readers)
    at = group + 2 + 3 * CELL + reader
    index = tl.load(place + tl.load(at, mask=inside, other=0), mask=inside, other=-1)
    shift = tl.load(at + READERS, mask=inside, other=0)
    part = tl.load(at + 2 * READERS, mask=inside, other=0)
    # A request that decodes in no step yet, or not in this one, has no query.
    asks = inside & (index >= 0)
    if tl.max(asks.to(tl.int32), 0) > 0:
        pair, low, high = pairs(HEAD, ROTARY, NEOX)
        rotary = pair < ROTARY // 2
        heads = kv_head * GROUP + member % GROUP
        q_at = query + index.to(tl.int64) * query_stride + heads * HEAD
        q_low = tl.load(q_at[:, None] + low[None, :], mask=asks[:, None], other=0.0)
        q_high = tl.load(q_at[:, None] + high[None, :], mask=asks[:, None], other=0.0)
        q_low, q_high = q_low.to(tl.float32) * scale, q_high.to(tl.float32) * scale
        angle = cos_sin + (tl.abs(shift).to(tl.int64) * ROTARY)[:, None] + pair[None, :]
        rotates = asks[:, None] & rotary[None, :]
        cos = tl.load(angle, mask=rotates, other=1.0).to(tl.float32)
        sin = tl.load(angle + ROTARY // 2, mask=rotates, other=0.0).to(tl.float32)
        sin = tl.where(shift[:, None] < 0, -sin, sin)
        element = query.dtype.element_ty
        q_low, q_high = (
            (q_low * cos + q_high * sin).to(element),
            (q_high * cos - q_low * sin).to(element),
        )

        dim = tl.arange(0, HEAD)
        lane = tl.arange(0, KEYS)
        slot = kv_head * head_stride + (lane % 16) * slot_stride
        tiles = tl.cdiv(tl.load(group) * 16, KEYS)
        row_max = tl.full([ROWS], float("-inf"), tl.float32)
        row_sum = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, HEAD], tl.float32)
        block, offset, seen = _keys_of(group, 0, tiles, CELL, KEYS)
        for tile in range(0, tiles):
            row = block.to(tl.int64) * block_stride + slot
            k_low = tl.load(key + row[None, :] + low[:, None], mask=seen[None, :], other=0.0)
            k_high = tl.load(key + row[None, :] + high[:, None], mask=seen[None, :], other=0.0)
            v = tl.load(value + row[:, None] + dim[None, :], mask=seen[:, None], other=0.0)
            if UNROTATED:
                angles = cos_sin + (offset.to(tl.int64) * ROTARY)[None, :] + pair[:, None]
                rotated = rotary[:, None] & seen[None, :]
                k_low, k_high = _rotated(k_low, k_high, angles, rotated, ROTARY)
            next_block, next_offset, next_seen = _keys_of(group, tile + 1, tiles, CELL, KEYS)
            scores = tl.dot(q_low, k_low, input_precision=PRECISION)
            scores = tl.dot(q_high, k_high, scores, input_precision=PRECISION)
            row_max, row_sum, acc = softmax_step(scores, seen, v, row_max, row_sum, acc, PRECISION)
            block, offset, seen = next_block, next_offset, next_seen

        some = row_sum > 0.0
        nonzero = tl.where(some, row_sum, 1.0)
        logs = tl.where(some, (row_max + tl.log2(nonzero)) * LN2, float("-inf"))
        to = part.to(tl.int64) * HEADS + heads
        tl.store(part_lse + to, logs, mask=asks)
        result = (acc / nonzero[:, None]).to(parts.dtype.element_ty)
        tl.store(parts + (to * HEAD)[:, None] + dim[None, :], result, mask=asks[:, None])


@triton.jit
def attend_groups(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    groups: tl.tensor,
    control: tl.tensor,
    counter: tl.tensor,
    place: tl.tensor,
    cos_sin: tl.tensor,
    parts: tl.tensor,
    part_lse: tl.tensor,
    scale: tl.tensor,
    query_stride: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    FEW: tl.constexpr,
    CELL: tl.constexpr,
    READERS: tl.constexpr,
    ROTARY: tl.constexpr,
    NEOX: tl.constexpr,
    KEYS: tl.constexpr,
    UNROTATED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Partial attention of all readers of the first control[0] rows of `groups`.

    Grid: as many programs as the device runs at once. `groups` [groups, WIDTH] int32 are those of
    `GroupRows`, `counter` [1] int32 is 0, `place` [rows] int32 is which request of the step has a
    row of the request table, or -1. `query` [requests, HEADS, HEAD], `key` and `value` (see
    `layout.key_value`). `scale` includes log2(e). `parts` [parts, HEADS, HEAD] may be of any
    floating type, `part_lse` [parts, HEADS] is float32; rows of requests that are not in the step
    are not written.
    """
    kv_heads: tl.constexpr = HEADS // GROUP
    full: tl.constexpr = ROWS // GROUP
    passes: tl.constexpr = (READERS + full - 1) // full
    tensors = (query, key, value, place, cos_sin, parts, part_lse)
    strides = (query_stride, block_stride, slot_stride, head_stride)
    count = tl.load(control) * kv_heads * passes
    work = tl.atomic_add(counter, 1)
    while work < count:
        # Asked for now, the next number is there when it is needed.
        following = tl.atomic_add(counter, 1)
        # Programs of one group are next to each other: the second finds its blocks in the L2 cache.
        group = groups + (work // (kv_heads * passes)).to(tl.int64) * WIDTH
        kv_head = work // passes % kv_heads
        first = work % passes * full
        readers = tl.load(group + 1)
        left = tl.minimum(readers - first, full)
        if left > FEW // GROUP:
            _attend_readers(
                tensors, group, scale, kv_head, first, readers, strides, HEADS, HEAD, GROUP,
                ROWS, CELL, READERS, ROTARY, NEOX, KEYS, UNROTATED, PRECISION,
            )  # fmt: skip
        elif left > 0:
            _attend_readers(
                tensors, group, scale, kv_head, first, readers, strides, HEADS, HEAD, GROUP,
                FEW, CELL, READERS, ROTARY, NEOX, KEYS, UNROTATED, PRECISION,
            )  # fmt: skip
        work = following
