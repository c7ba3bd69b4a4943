"""Decode: attention of one query a request, its keys divided into splits (Triton).

A program serves one KV head and one split of a request: it reads the split's tiles of blocks with
an online softmax (Milakov and Gimelshein, arXiv 1805.02867) and writes a partial output and the
log-sum-exp of its scores, which `merge` joins. All query heads of the KV head are packed into one
tile, so that keys and values are read once.

`hopper_decode` does the same for most heads on Hopper; this serves other heads and other GPUs.

The keys of a tile share a RoPE shift. Since <q, R(s) k> = <R(-s) q, k>, the query is re-rotated
once a tile in place of every key. Keys cached without RoPE have a shift each and are rotated
themselves.

The blocks of a tile are loaded a tile ahead and carried in registers: then no load of keys or
values waits for another load, and the compiler keeps `num_stages` tiles of them in flight.
"""

import triton
import triton.language as tl

from picbench.kernels.cuda.base_two import LN2
from picbench.kernels.cuda.pairing import pair_of, pairs


@triton.jit
def _split_tiles(  # type: ignore[no-untyped-def]
    tiles: tl.tensor, request: tl.tensor, split: tl.tensor, splits: tl.tensor
):
    """First tile of this split, and the end of its tiles."""
    count = tl.load(tiles + request)
    length = tl.cdiv(count, splits)
    first = split * length
    return first, tl.minimum(first + length, count)


@triton.jit
def _load_blocks(  # type: ignore[no-untyped-def]
    blocks: tl.tensor, bits: tl.tensor, tile: tl.tensor, last: tl.tensor, TILE: tl.constexpr
):
    """The cache block of each key of a tile, and whether its slot is visible.

    Reading ahead ends at the split's last tile, which is then returned again.
    """
    lane = tl.arange(0, TILE)
    at = tl.minimum(tile, last - 1) * (TILE // 16) + lane // 16
    seen = tl.load(bits + at) >> (lane % 16)
    return tl.load(blocks + at), (seen & 1) != 0


@triton.jit
def softmax_step(
    scores: tl.tensor,
    seen: tl.tensor,
    value: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    acc: tl.tensor,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One step of the online softmax; `scores` are in base 2."""
    scores = tl.where(seen[None, :], scores, float("-inf"))
    peak = tl.maximum(row_max, tl.max(scores, 1))
    safe = tl.where(peak == float("-inf"), 0.0, peak)
    weight = tl.exp2(scores - safe[:, None])
    rescale = tl.exp2(row_max - safe)
    row_sum = row_sum * rescale + tl.sum(weight, 1)
    return (
        peak,
        row_sum,
        tl.dot(weight.to(value.dtype), value, acc * rescale[:, None], input_precision=PRECISION),
    )


@triton.jit
def _store_split(  # type: ignore[no-untyped-def]
    partial: tl.tensor,
    lse: tl.tensor,
    index: tl.tensor,
    heads: tl.tensor,
    packed: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    acc: tl.tensor,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
):
    """Stores a split's output and log-sum-exp, -inf if it saw nothing."""
    some = row_sum > 0.0
    nonzero = tl.where(some, row_sum, 1.0)
    logs = tl.where(some, (row_max + tl.log2(nonzero)) * LN2, float("-inf"))
    row = index.to(tl.int64) * HEADS + heads
    tl.store(lse + row, logs, mask=packed)
    at = partial + row[:, None] * HEAD + tl.arange(0, HEAD)[None, :]
    tl.store(at, acc / nonzero[:, None], mask=packed[:, None])


@triton.jit
def _load_cos_sin(  # type: ignore[no-untyped-def]
    table: tl.tensor, shift: tl.tensor, column: tl.tensor, rotates: tl.tensor, ROTARY: tl.constexpr
):
    """Cosine and sine of a signed RoPE shift by dimension; the identity unless it `rotates`."""
    row = table + tl.abs(shift).to(tl.int64) * ROTARY + column
    cos = tl.load(row, mask=rotates, other=1.0).to(tl.float32)
    sin = tl.load(row + ROTARY // 2, mask=rotates, other=0.0).to(tl.float32)
    return cos, tl.where(shift < 0, -sin, sin)


@triton.jit(do_not_specialize=["splits"])
def decode_tiles(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    blocks: tl.tensor,
    seen_bits: tl.tensor,
    rope_shift: tl.tensor,
    tiles: tl.tensor,
    table_rows: tl.tensor,
    cos_sin: tl.tensor,
    partial: tl.tensor,
    lse: tl.tensor,
    scale: tl.tensor,
    query_stride: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    list_stride: tl.tensor,
    shift_stride: tl.tensor,
    splits: tl.tensor,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    ROTARY: tl.constexpr,
    NEOX: tl.constexpr,
    TILE: tl.constexpr,
    UNROTATED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Partial attention over keys cached with RoPE, in tiles of one shift, or without (UNROTATED).

    Grid (KV heads, splits, requests). `query` [requests, HEADS, HEAD], `key` and `value` (see
    `layout.key_value`). `blocks` and `seen_bits` [requests, width] int32 are cache blocks and their
    visible slots, TILE / 16 blocks a tile; `tiles` [requests] int32 counts tiles. `rope_shift`
    int32 is that of the request table, [rows, max_tiles] or [rows, slots], `table_rows` [requests]
    int32 the row of each request. `scale` includes log2(e). `partial` [requests * splits, HEADS,
    HEAD] and `lse` [requests * splits, HEADS] are float32.
    """
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    request = tl.program_id(2)
    first, last = _split_tiles(tiles, request, split, splits)
    if first >= last:
        return

    dim = tl.arange(0, HEAD)
    if UNROTATED:
        pair, low, high = pairs(HEAD, ROTARY, NEOX)
        rotates = (pair < ROTARY // 2)[:, None]
    lane = tl.arange(0, TILE)
    member = tl.arange(0, PACKED)
    packed = member < GROUP
    heads = kv_head * GROUP + member
    if UNROTATED:
        q_at = query + request * query_stride + heads[:, None] * HEAD
        q_low = tl.load(q_at + low[None, :], mask=packed[:, None], other=0.0)
        q_high = tl.load(q_at + high[None, :], mask=packed[:, None], other=0.0)
    else:
        paired_dim, column, leads = pair_of(dim, ROTARY, NEOX)
        rotates = dim < ROTARY
        q_at = query + request * query_stride + heads[:, None] * HEAD
        q = tl.load(q_at + dim[None, :], mask=packed[:, None], other=0.0).to(tl.float32)
        paired = tl.load(q_at + paired_dim[None, :], mask=packed[:, None], other=0.0)
        paired = paired.to(tl.float32) * tl.where(leads, 1.0, -1.0)[None, :]

    blocks += request.to(tl.int64) * list_stride
    seen_bits += request.to(tl.int64) * list_stride
    shift_row = tl.load(table_rows + request).to(tl.int64) * shift_stride
    rope_shift += (shift_row + lane) if UNROTATED else shift_row
    inside = kv_head * head_stride + (lane % 16) * slot_stride
    row_max = tl.full([PACKED], float("-inf"), tl.float32)
    row_sum = tl.zeros([PACKED], tl.float32)
    acc = tl.zeros([PACKED, HEAD], tl.float32)
    block, seen = _load_blocks(blocks, seen_bits, first, last, TILE)
    if UNROTATED:
        shift = tl.load(rope_shift + first * TILE, mask=seen, other=0)
    else:
        cos, sin = _load_cos_sin(cos_sin, tl.load(rope_shift + first), column, rotates, ROTARY)
        shift = tl.load(rope_shift + tl.minimum(first + 1, last - 1))
    for tile in range(first, last):
        at = block.to(tl.int64) * block_stride + inside
        if UNROTATED:
            k_low = tl.load(key + at[None, :] + low[:, None], mask=seen[None, :], other=0.0)
            k_high = tl.load(key + at[None, :] + high[:, None], mask=seen[None, :], other=0.0)
            v = tl.load(value + at[:, None] + dim[None, :], mask=seen[:, None], other=0.0)
            angle = cos_sin + shift.to(tl.int64)[None, :] * ROTARY + pair[:, None]
            cos = tl.load(angle, mask=rotates, other=1.0).to(tl.float32)
            sin = tl.load(angle + ROTARY // 2, mask=rotates, other=0.0).to(tl.float32)
            next_block, next_seen = _load_blocks(blocks, seen_bits, tile + 1, last, TILE)
            ahead = rope_shift + tl.minimum(tile + 1, last - 1) * TILE
            shift = tl.load(ahead, mask=next_seen, other=0)
            k_low_rotated = (k_low * cos - k_high * sin).to(k_low.dtype)
            k_high_rotated = (k_high * cos + k_low * sin).to(k_low.dtype)
            scores = tl.dot(q_low, k_low_rotated, input_precision=PRECISION)
            scores = tl.dot(q_high, k_high_rotated, scores, input_precision=PRECISION) * scale
        else:
            k = tl.load(key + at[None, :] + dim[:, None], mask=seen[None, :], other=0.0)
            v = tl.load(value + at[:, None] + dim[None, :], mask=seen[:, None], other=0.0)
            next_block, next_seen = _load_blocks(blocks, seen_bits, tile + 1, last, TILE)
            next_cos, next_sin = _load_cos_sin(cos_sin, shift, column, rotates, ROTARY)
            shift = tl.load(rope_shift + tl.minimum(tile + 2, last - 1))
            rotated = (q * cos[None, :] + paired * sin[None, :]).to(k.dtype)
            scores = tl.dot(rotated, k, input_precision=PRECISION) * scale
            cos, sin = next_cos, next_sin
        row_max, row_sum, acc = softmax_step(scores, seen, v, row_max, row_sum, acc, PRECISION)
        block, seen = next_block, next_seen

    index = request * splits + split
    _store_split(partial, lse, index, heads, packed, row_max, row_sum, acc, HEADS, HEAD)
