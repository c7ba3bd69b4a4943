"""Which cache blocks each request of a decode step reads (Triton)."""

import triton
import triton.language as tl

#: Visible blocks that one program looks up.
SPAN = 1024

# Parts of tensors that are uploaded with each step: where they begin depends on its requests.
_PER_STEP = ["block_table", "table_rows", "lengths"]


# Of what depends on the step nothing is assumed: each assumption would be a kernel of its own.
@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=_PER_STEP)
def look_up_blocks(
    listed_blocks: tl.tensor,
    listed_seen: tl.tensor,
    bounds: tl.tensor,
    block_table: tl.tensor,
    table_rows: tl.tensor,
    lengths: tl.tensor,
    blocks: tl.tensor,
    seen: tl.tensor,
    tiles: tl.tensor,
    list_stride: tl.tensor,
    table_stride: tl.tensor,
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
) -> None:
    """Fills `blocks`, `seen` [requests, width] and `tiles` [requests]; all tensors are int32.

    Grid (requests, width / SPAN). The visible blocks of request r are those listed in row
    table_rows[r] of the request table (`listed_blocks`, `listed_seen`, `bounds`), then the tail, in
    tiles of WIDTH. Their indices become cache blocks by `block_table` [requests, max_blocks], and
    slots after the first lengths[r] are cleared from `seen`. A length of 0 makes no tiles, a
    negative one -1, which `merge` takes for a request without keys.
    """
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(table_rows + request).to(tl.int64)
    length = tl.load(lengths + request)
    listed = tl.load(bounds + row * 2)
    tail = tl.load(bounds + row * 2 + 1)
    tail_blocks = tl.maximum(tl.cdiv(length, 16) - tail, 0)
    count = tl.where(length > 0, listed + tl.cdiv(tail_blocks, WIDTH), 0)
    if tl.program_id(1) == 0:
        tl.store(tiles + request, tl.where(length < 0, -1, count))
    place = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    wanted = place < count * WIDTH
    known = wanted & (place < listed * WIDTH)
    index = tl.load(listed_blocks + row * list_stride + place, mask=known, other=0)
    bits = tl.load(listed_seen + row * list_stride + place, mask=known, other=0xFFFF)
    index = tl.where(known, index, tail + place - listed * WIDTH)
    filled = tl.minimum(tl.maximum(length - index * 16, 0), 16)
    bits = tl.where(index >= 0, bits & ((1 << filled) - 1), 0)
    block = tl.load(
        block_table + request * table_stride + index, mask=wanted & (bits != 0), other=0
    )
    tl.store(blocks + request * list_stride + place, block, mask=wanted)
    tl.store(seen + request * list_stride + place, bits, mask=wanted)
