"""The step's view of the row table: which cache blocks each request reads (Triton)."""

import triton
import triton.language as tl

#: VisibleBlocks that one program resolves.
SPAN = 1024


@triton.jit
def resolve(
    row_blocks: tl.tensor,
    row_seen: tl.tensor,
    bounds: tl.tensor,
    table: tl.tensor,
    rows: tl.tensor,
    lengths: tl.tensor,
    blocks: tl.tensor,
    seen: tl.tensor,
    tiles: tl.tensor,
    entry_stride: tl.tensor,
    table_stride: tl.tensor,
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
) -> None:
    """Fills `blocks`, `seen` [requests, entries] and `tiles` [requests], all int32.

    Grid (requests, entries / SPAN). Entries are the request's in the request table
    (VisibleBlocks), then its tail; indices become blocks of the cache by `table`
    [requests, max_blocks], and slots after the first lengths[request] are cleared from `seen`. A
    length of 0 makes no tiles.
    """
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request).to(tl.int64)
    length = tl.load(lengths + request)
    listed = tl.load(bounds + row * 2)
    tail = tl.load(bounds + row * 2 + 1)
    behind = tl.maximum(tl.cdiv(length, 16) - tail, 0)
    count = tl.where(length > 0, listed + tl.cdiv(behind, WIDTH), 0)
    if tl.program_id(1) == 0:
        tl.store(tiles + request, count)
    entry = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    wanted = entry < count * WIDTH
    known = wanted & (entry < listed * WIDTH)
    index = tl.load(row_blocks + row * entry_stride + entry, mask=known, other=0)
    bits = tl.load(row_seen + row * entry_stride + entry, mask=known, other=0xFFFF)
    index = tl.where(known, index, tail + entry - listed * WIDTH)
    filled = tl.minimum(tl.maximum(length - index * 16, 0), 16)
    bits = tl.where(index >= 0, bits & ((1 << filled) - 1), 0)
    block = tl.load(table + request * table_stride + index, mask=wanted & (bits != 0), other=0)
    tl.store(blocks + request * entry_stride + entry, block, mask=wanted)
    tl.store(seen + request * entry_stride + entry, bits, mask=wanted)
