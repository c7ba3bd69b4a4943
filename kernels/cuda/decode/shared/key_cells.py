"""A request's canonical blocks in cells, which other requests may read as well. Host side, numpy.

Requests that see the same blocks see them at other positions, but cut alike: a cell begins where a
chunk begins, or a whole number of cells after that. So cells of two requests are the same if their
contents are, and nothing has to be searched for.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from picbench.kernels.cuda.visible_blocks import Bools, Ints, VisibleBlocks
from picbench.kernels.paging import BLOCK_SIZE, GAP

#: Blocks of a cell, if its chunk has as many: 512 keys.
CELL_BLOCKS = 32


@dataclass(frozen=True, slots=True)
class KeyCell:
    """Blocks whose keys one request sees at one RoPE shift: the tiles [first, last) of its row.

    `contents` [3, blocks] int32: blocks of the pool, bits of their visible slots, and the position
    to which the key in slot 0 of each has still to be rotated before it is shifted (0 for keys
    cached with RoPE). Two cells with one `key` are read by the same loads.
    """

    key: bytes
    contents: Ints
    first: int
    last: int
    shift: int

    @property
    def blocks(self) -> int:
        """Blocks to read, those of the last tile that are not there counted."""
        return int(self.contents.shape[1])


def cut_cells(
    visible: VisibleBlocks, ids: Ints, cell_blocks: int, starts: Ints | None = None
) -> list[KeyCell]:
    """The cells of the listed tiles of a request whose first blocks are `ids` of the pool.

    Tiles that have a block which is not among these, or one whose positions are not consecutive,
    are in no cell. `starts` [blocks] int32, for keys cached without RoPE, is the logical position
    of slot 0 of each block, GAP where the visible slots have no common one.
    """
    tiles, width = visible.blocks.shape
    listed = visible.blocks >= 0
    inside = np.where(listed, visible.blocks, 0)
    shared: Bools = np.asarray((inside < len(ids)).all(1))
    contents = np.zeros((3, tiles, width), np.int32)
    contents[1] = visible.seen
    if shared.any():
        contents[0, shared] = np.where(listed, ids[np.minimum(inside, len(ids) - 1)], 0)[shared]
    if starts is not None and tiles:
        start = starts[np.minimum(inside, len(starts) - 1)]
        # A chunk compiled at a negative position would be rotated by a negative angle.
        offset = np.where(listed, start - visible.rope_shift[:, None], 0)
        shared &= ((start != GAP) & (offset >= 0)).all(1)
        contents[2] = offset
    return _cut(contents, shared, visible.rope_shift, cell_blocks // width)


def _cut(contents: Ints, shared: Bools, shift: Ints, longest: int) -> list[KeyCell]:
    tiles = len(shift)
    changes = np.flatnonzero((np.diff(shift) != 0) | (np.diff(shared.astype(np.int8)) != 0)) + 1
    bounds = [0, *changes.tolist(), tiles] if tiles else [0]
    cells = []
    for start, stop in pairwise(bounds):
        if not shared[start]:
            continue
        for first in range(start, stop, longest):
            last = min(first + longest, stop)
            own = np.ascontiguousarray(contents[:, first:last]).reshape(3, -1)
            cells.append(KeyCell(own.tobytes(), own, first, last, int(shift[start])))
    return cells


def block_starts(kpos: Ints) -> Ints:
    """Logical position of slot 0 of each whole block [blocks], GAP where there is no common one.

    `kpos` [slots] are logical positions in compute order, GAP for slots that are not visible.
    """
    whole = len(kpos) // BLOCK_SIZE * BLOCK_SIZE
    paged = kpos[:whole].reshape(-1, BLOCK_SIZE)
    visible = paged != GAP
    start = paged - np.arange(BLOCK_SIZE, dtype=np.int32)
    first = start[np.arange(len(start)), visible.argmax(1)]
    common = ((start == first[:, None]) | ~visible).all(1) & visible.any(1)
    return np.where(common, first, GAP).astype(np.int32)
