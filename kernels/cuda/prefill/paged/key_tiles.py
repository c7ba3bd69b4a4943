"""A request's keys in tiles of 128 that share a RoPE shift. Host side, numpy."""

from dataclasses import dataclass

import numpy as np

from picbench.kernels.cuda.visible_blocks import Bools, Ints, in_tiles
from picbench.kernels.paging import BLOCK_SIZE, GAP
from picbench.kernels.slot_runs import SlotRuns

#: Keys of a tile, and how many of the last ones may be hidden without a mask.
KEYS, LOOSE = 128, BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class KeyTiles:
    """Tiles of whole blocks with one RoPE shift each, in compute order; all arrays are int32.

    `slots` and `kpos` [tiles, 128] are the request's slots and their logical positions, -1 and GAP
    where a key is hidden. `rope_shift`, `lowest` and `highest` [tiles] are the shift and the
    extreme positions. `shown` [tiles] is the number of visible keys. Where those come first and at
    most a block of hidden ones follows, a query after `highest` sees the tile as a whole; of other
    tiles `highest` is GAP.
    """

    slots: Ints
    kpos: Ints
    rope_shift: Ints
    lowest: Ints
    highest: Ints
    shown: Ints

    @classmethod
    def of(cls, slots: SlotRuns) -> "KeyTiles | None":
        """Tiles of a request's slots.

        None where the shifts differ within a block, as they do for keys cached without RoPE.
        """
        found = _shifted_blocks(slots if slots.rope_shift is not None else slots.single())
        if found is None:
            return None
        kept, shift = found
        blocks, rope_shift = in_tiles(kept, shift, KEYS // BLOCK_SIZE)
        at = _positions(slots, blocks)
        seen = at != GAP
        shown = np.count_nonzero(seen, axis=1).astype(np.int32)
        lanes = np.arange(BLOCK_SIZE, dtype=np.int32)
        own = (blocks[:, :, None] * BLOCK_SIZE + lanes).reshape(-1, KEYS)
        highest = np.where(seen, at, -1).max(1, initial=-1)
        return cls(
            np.where(seen, own, -1),
            at,
            rope_shift,
            at.min(1, initial=GAP),
            np.where(_is_loose(seen, shown), highest, GAP).astype(np.int32),
            shown,
        )


def _shifted_blocks(slots: SlotRuns) -> tuple[Ints, Ints] | None:
    """Blocks with a visible slot, ascending, and the RoPE shift of each; None if one has two."""
    assert slots.rope_shift is not None
    visible = np.flatnonzero((slots.positions != GAP) & (slots.counts > 0))
    first = slots.starts[visible] // BLOCK_SIZE
    counts = (slots.starts[visible + 1] - 1) // BLOCK_SIZE + 1 - first
    before = np.cumsum(counts) - counts
    blocks = np.repeat(first - before, counts) + np.arange(counts.sum())
    shift = np.repeat(slots.rope_shift[visible], counts)
    again = blocks[1:] == blocks[:-1]
    if (again & (shift[1:] != shift[:-1])).any():
        return None
    once = np.append(~again, True)[: len(blocks)]
    return blocks[once].astype(np.int32), shift[once]


def _positions(slots: SlotRuns, blocks: Ints) -> Ints:
    """Logical positions of all slots of `blocks` [tiles, width], GAP for what is not there."""
    count = len(slots)
    paged = np.full((-(-count // BLOCK_SIZE) + 1, BLOCK_SIZE), GAP, np.int32)
    paged.reshape(-1)[:count] = slots.kpos(0, count)
    # Block -1 is the last one, of nothing but gaps.
    found: Ints = paged[blocks].reshape(-1, KEYS)
    return found


def _is_loose(seen: Bools, shown: Ints) -> Bools:
    first: Bools = (shown == KEYS) | (seen.argmin(1) == shown)
    return first & (shown >= KEYS - LOOSE)
