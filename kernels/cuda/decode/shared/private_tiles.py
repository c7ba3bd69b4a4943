"""Which cache blocks each request of a decode step reads alone (Triton)."""

import triton
import triton.language as tl

#: Tiles that one program looks up.
TILES = 128

_PER_STEP = ["block_table", "table_rows", "lengths"]


@triton.jit
def _read_alone(  # type: ignore[no-untyped-def]
    cell_of_tile: tl.tensor, part_of: tl.tensor, tile: tl.tensor, listed: tl.tensor, last: tl.tensor
):
    """Which of these tiles of a row no group reads; `last` tiles may be in groups at all."""
    cell = tl.load(cell_of_tile + tile, mask=tile < last, other=-1)
    part = tl.load(part_of + cell, mask=cell >= 0, other=-1)
    return (tile < listed) & (part < 0)


# Of what depends on the step nothing is assumed: each assumption would be a kernel of its own.
@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=_PER_STEP)
def look_up_private_tiles(
    listed_blocks: tl.tensor,
    listed_seen: tl.tensor,
    listed_shift: tl.tensor,
    bounds: tl.tensor,
    cell_of_tile: tl.tensor,
    part_of: tl.tensor,
    control: tl.tensor,
    block_table: tl.tensor,
    table_rows: tl.tensor,
    lengths: tl.tensor,
    blocks: tl.tensor,
    seen: tl.tensor,
    shifts: tl.tensor,
    tiles: tl.tensor,
    place: tl.tensor,
    list_stride: tl.tensor,
    shift_stride: tl.tensor,
    cell_stride: tl.tensor,
    table_stride: tl.tensor,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    SHIFTS: tl.constexpr,
) -> None:
    """`look_up_blocks` without the tiles that groups read; the others move up.

    Grid (requests, max_tiles / TILES). `shifts` [requests, max_tiles * SHIFTS] gets the RoPE shifts
    of the request table in that order, SHIFTS a tile. `tiles` [requests] counts what is left, -1
    for negative lengths. place[row] is set to the request that reads it, if it has a length.
    """
    request = tl.program_id(0).to(tl.int64)
    span = tl.program_id(1)
    row = tl.load(table_rows + request).to(tl.int64)
    length = tl.load(lengths + request)
    listed = tl.where(length > 0, tl.load(bounds + row * 2), 0)
    tail = tl.load(bounds + row * 2 + 1)
    tail_blocks = tl.where(length > 0, tl.maximum(tl.cdiv(length, 16) - tail, 0), 0)
    last = tl.where(tl.load(control) > 0, listed, 0)
    lane = tl.arange(0, TILES)
    cell_of_tile += row * cell_stride
    part_of += row * cell_stride
    own = span * TILES

    before = 0
    alone = 0
    for first in range(0, listed, TILES):
        kept = _read_alone(cell_of_tile, part_of, first + lane, listed, last)
        count = tl.sum(kept.to(tl.int32), 0)
        before += tl.where(first < own, count, 0)
        alone += count
    tail_tiles = tl.cdiv(tail_blocks, WIDTH)
    if span == 0:
        tl.store(tiles + request, tl.where(length < 0, -1, alone + tail_tiles))
        tl.store(place + row, request.to(tl.int32), mask=length > 0)

    # Tiles of this span that are listed, to where they belong among those that are left.
    tile = own + lane
    kept = _read_alone(cell_of_tile, part_of, tile, listed, last)
    target = before + tl.cumsum(kept.to(tl.int32), 0) - 1
    member = tl.arange(0, WIDTH)
    from_list = listed_blocks + row * list_stride + tile[:, None] * WIDTH + member[None, :]
    index = tl.load(from_list, mask=kept[:, None], other=-1)
    from_list = listed_seen + row * list_stride + tile[:, None] * WIDTH + member[None, :]
    bits = tl.load(from_list, mask=kept[:, None], other=0)
    filled = tl.minimum(tl.maximum(length - index * 16, 0), 16)
    bits = tl.where(index >= 0, bits & ((1 << filled) - 1), 0)
    block = tl.load(block_table + request * table_stride + index, mask=bits != 0, other=0)
    at = request * list_stride + target[:, None] * WIDTH + member[None, :]
    tl.store(blocks + at, block, mask=kept[:, None])
    tl.store(seen + at, bits, mask=kept[:, None])
    angle = tl.arange(0, SHIFTS)
    source = listed_shift + row * shift_stride + tile[:, None] * SHIFTS + angle[None, :]
    shift = tl.load(source, mask=kept[:, None], other=0)
    at = request * shift_stride + target[:, None] * SHIFTS + angle[None, :]
    tl.store(shifts + at, shift, mask=kept[:, None])

    # Tiles of the tail that end up in this span.
    nth = tile - alone
    wanted = (nth >= 0) & (nth < tail_tiles)
    index = tail + nth[:, None] * WIDTH + member[None, :]
    filled = tl.minimum(tl.maximum(length - index * 16, 0), 16)
    bits = tl.where(wanted[:, None], (1 << filled) - 1, 0)
    block = tl.load(block_table + request * table_stride + index, mask=bits != 0, other=0)
    at = request * list_stride + tile[:, None] * WIDTH + member[None, :]
    tl.store(blocks + at, block, mask=wanted[:, None])
    tl.store(seen + at, bits, mask=wanted[:, None])
    source = listed_shift + row * shift_stride + (listed + nth)[:, None] * SHIFTS + angle[None, :]
    if SHIFTS == 1:
        shift = tl.zeros([TILES, SHIFTS], tl.int32)
    else:
        shift = tl.load(source, mask=wanted[:, None], other=0)
    at = request * shift_stride + tile[:, None] * SHIFTS + angle[None, :]
    tl.store(shifts + at, shift, mask=wanted[:, None])
