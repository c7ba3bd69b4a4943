"""Decode: attention of one query a request, its keys divided into splits (Triton).

A program serves one KV head and one split of a request: it walks over tiles of blocks, keeps a
running softmax (Milakov and Gimelshein, arXiv 1805.02867) and leaves a partial output and the
log-sum-exp of its scores; `merge` joins them. All query heads of the KV head are packed into one
tile, so that keys and values are read once.

On Hopper `decode_kernel` serves most heads in the same way; this serves the rest, and other GPUs.

The keys of a tile share a turn. Since <q, R(t) k> = <R(-t) q, k>, the query is turned back, once a
tile, instead of every key forward. Unrotated keys have a turn each and are rotated themselves.

Which blocks a tile reads is loaded a tile ahead and carried in registers: then no load of keys or
values waits for another load, and the compiler keeps `num_stages` tiles of them in flight.
"""

import triton
import triton.language as tl

_LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def _share(  # type: ignore[no-untyped-def]
    tiles: tl.tensor, request: tl.tensor, split: tl.tensor, splits: tl.tensor
):
    """First and last tile of this split."""
    count = tl.load(tiles + request)
    share = tl.cdiv(count, splits)
    first = split * share
    return first, tl.minimum(first + share, count)


@triton.jit
def _slots(  # type: ignore[no-untyped-def]
    blocks: tl.tensor, bits: tl.tensor, tile: tl.tensor, last: tl.tensor, TILE: tl.constexpr
):
    """The cache block of each lane of a tile, and whether its slot is seen.

    Reading ahead ends at the split's last tile, which is then given again.
    """
    lane = tl.arange(0, TILE)
    entry = tl.minimum(tile, last - 1) * (TILE // 16) + lane // 16
    seen = tl.load(bits + entry) >> (lane % 16)
    return tl.load(blocks + entry), (seen & 1) != 0


@triton.jit
def _accumulate(  # type: ignore[no-untyped-def]
    scores: tl.tensor,
    seen: tl.tensor,
    value: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    PRECISION: tl.constexpr,
):
    """One step of the running softmax; `scores` are in base 2."""
    scores = tl.where(seen[None, :], scores, float("-inf"))
    peak = tl.maximum(highest, tl.max(scores, 1))
    safe = tl.where(peak == float("-inf"), 0.0, peak)
    weight = tl.exp2(scores - safe[:, None])
    fade = tl.exp2(highest - safe)
    total = total * fade + tl.sum(weight, 1)
    return (
        peak,
        total,
        tl.dot(weight.to(value.dtype), value, out * fade[:, None], input_precision=PRECISION),
    )


@triton.jit
def _leave(  # type: ignore[no-untyped-def]
    partial: tl.tensor,
    lse: tl.tensor,
    part: tl.tensor,
    heads: tl.tensor,
    packed: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
):
    """Stores a split's output and log-sum-exp (-inf if it saw nothing)."""
    some = total > 0.0
    nonzero = tl.where(some, total, 1.0)
    logs = tl.where(some, (highest + tl.log2(nonzero)) * _LN2, float("-inf"))
    row = part.to(tl.int64) * HEADS + heads
    tl.store(lse + row, logs, mask=packed)
    at = partial + row[:, None] * HEAD + tl.arange(0, HEAD)[None, :]
    tl.store(at, out / nonzero[:, None], mask=packed[:, None])


@triton.jit
def _cos_sin(  # type: ignore[no-untyped-def]
    table: tl.tensor, turn: tl.tensor, dim: tl.tensor, ROTARY: tl.constexpr
):
    """Cosine and sine of a signed turn for each dimension; the identity behind ROTARY."""
    half: tl.constexpr = ROTARY // 2
    row = table + tl.abs(turn).to(tl.int64) * ROTARY + dim % half
    cos = tl.load(row, mask=dim < ROTARY, other=1.0).to(tl.float32)
    sin = tl.load(row + half, mask=dim < ROTARY, other=0.0).to(tl.float32)
    return cos, tl.where(turn < 0, -sin, sin)


@triton.jit(do_not_specialize=["splits"])
def attend_turned(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    blocks: tl.tensor,
    seen_bits: tl.tensor,
    turns: tl.tensor,
    tiles: tl.tensor,
    rows: tl.tensor,
    cos_sin: tl.tensor,
    partial: tl.tensor,
    lse: tl.tensor,
    scale: tl.tensor,
    query_stride: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    entry_stride: tl.tensor,
    turn_stride: tl.tensor,
    splits: tl.tensor,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    ROTARY: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Partial attention over keys that rest rotated, by tiles of one turn.

    Grid (KV heads, splits, requests). `blocks` and `seen_bits` [requests, entries] int32 are
    cache blocks and their visible slots, TILE / 16 entries a tile; `tiles` [requests] counts
    tiles. `turns` [rows, tiles] int32 is indexed by `rows` [requests]. `scale` includes log2(e).
    `partial` [requests * splits, HEADS, HEAD] and `lse` [requests * splits, HEADS] are float32.
    """
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    request = tl.program_id(2)
    first, last = _share(tiles, request, split, splits)
    if first >= last:
        return

    half: tl.constexpr = ROTARY // 2
    dim = tl.arange(0, HEAD)
    lane = tl.arange(0, TILE)
    member = tl.arange(0, PACKED)
    packed = member < GROUP
    heads = kv_head * GROUP + member
    mate = tl.where(dim < half, dim + half, tl.where(dim < ROTARY, dim - half, dim))
    q_at = query + request * query_stride + heads[:, None] * HEAD
    q = tl.load(q_at + dim[None, :], mask=packed[:, None], other=0.0).to(tl.float32)
    paired = tl.load(q_at + mate[None, :], mask=packed[:, None], other=0.0).to(tl.float32)
    paired = paired * tl.where(dim < half, 1.0, -1.0)[None, :]

    blocks += request.to(tl.int64) * entry_stride
    seen_bits += request.to(tl.int64) * entry_stride
    turns += tl.load(rows + request).to(tl.int64) * turn_stride
    inside = kv_head * head_stride + (lane % 16) * slot_stride
    highest = tl.full([PACKED], float("-inf"), tl.float32)
    total = tl.zeros([PACKED], tl.float32)
    out = tl.zeros([PACKED, HEAD], tl.float32)
    block, seen = _slots(blocks, seen_bits, first, last, TILE)
    cos, sin = _cos_sin(cos_sin, tl.load(turns + first), dim, ROTARY)
    turn = tl.load(turns + tl.minimum(first + 1, last - 1))
    for tile in range(first, last):
        at = block.to(tl.int64) * block_stride + inside
        k = tl.load(key + at[None, :] + dim[:, None], mask=seen[None, :], other=0.0)
        v = tl.load(value + at[:, None] + dim[None, :], mask=seen[:, None], other=0.0)
        next_block, next_seen = _slots(blocks, seen_bits, tile + 1, last, TILE)
        next_cos, next_sin = _cos_sin(cos_sin, turn, dim, ROTARY)
        turn = tl.load(turns + tl.minimum(tile + 2, last - 1))
        turned = (q * cos[None, :] + paired * sin[None, :]).to(k.dtype)
        scores = tl.dot(turned, k, input_precision=PRECISION) * scale
        highest, total, out = _accumulate(scores, seen, v, highest, total, out, PRECISION)
        block, seen, cos, sin = next_block, next_seen, next_cos, next_sin

    part = request * splits + split
    _leave(partial, lse, part, heads, packed, highest, total, out, HEADS, HEAD)


@triton.jit(do_not_specialize=["splits"])
def attend_unrotated(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    blocks: tl.tensor,
    seen_bits: tl.tensor,
    turns: tl.tensor,
    tiles: tl.tensor,
    rows: tl.tensor,
    cos_sin: tl.tensor,
    partial: tl.tensor,
    lse: tl.tensor,
    scale: tl.tensor,
    query_stride: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    entry_stride: tl.tensor,
    turn_stride: tl.tensor,
    splits: tl.tensor,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    ROTARY: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """`attend_turned` for keys that have a turn each and are rotated when they are read.

    `turns` [rows, slots] int32 holds the turn of each slot, 16 an entry; ROTARY is HEAD.
    """
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    request = tl.program_id(2)
    first, last = _share(tiles, request, split, splits)
    if first >= last:
        return

    half: tl.constexpr = HEAD // 2
    dim = tl.arange(0, HEAD)
    low = tl.arange(0, half)
    lane = tl.arange(0, TILE)
    member = tl.arange(0, PACKED)
    packed = member < GROUP
    heads = kv_head * GROUP + member
    q_at = query + request * query_stride + heads[:, None] * HEAD + low[None, :]
    q_low = tl.load(q_at, mask=packed[:, None], other=0.0)
    q_high = tl.load(q_at + half, mask=packed[:, None], other=0.0)

    blocks += request.to(tl.int64) * entry_stride
    seen_bits += request.to(tl.int64) * entry_stride
    turns += tl.load(rows + request).to(tl.int64) * turn_stride + lane
    inside = kv_head * head_stride + (lane % 16) * slot_stride
    highest = tl.full([PACKED], float("-inf"), tl.float32)
    total = tl.zeros([PACKED], tl.float32)
    out = tl.zeros([PACKED, HEAD], tl.float32)
    block, seen = _slots(blocks, seen_bits, first, last, TILE)
    turn = tl.load(turns + first * TILE, mask=seen, other=0)
    for tile in range(first, last):
        at = block.to(tl.int64) * block_stride + inside
        k_low = tl.load(key + at[None, :] + low[:, None], mask=seen[None, :], other=0.0)
        k_high = tl.load(key + at[None, :] + low[:, None] + half, mask=seen[None, :], other=0.0)
        v = tl.load(value + at[:, None] + dim[None, :], mask=seen[:, None], other=0.0)
        angle = cos_sin + turn.to(tl.int64)[None, :] * ROTARY + low[:, None]
        cos = tl.load(angle).to(tl.float32)
        sin = tl.load(angle + half).to(tl.float32)
        next_block, next_seen = _slots(blocks, seen_bits, tile + 1, last, TILE)
        turn = tl.load(turns + tl.minimum(tile + 1, last - 1) * TILE, mask=next_seen, other=0)
        ahead = (k_low * cos - k_high * sin).to(k_low.dtype)
        behind = (k_high * cos + k_low * sin).to(k_low.dtype)
        scores = tl.dot(q_low, ahead, input_precision=PRECISION)
        scores = tl.dot(q_high, behind, scores, input_precision=PRECISION) * scale
        highest, total, out = _accumulate(scores, seen, v, highest, total, out, PRECISION)
        block, seen = next_block, next_seen

    part = request * splits + split
    _leave(partial, lse, part, heads, packed, highest, total, out, HEADS, HEAD)
