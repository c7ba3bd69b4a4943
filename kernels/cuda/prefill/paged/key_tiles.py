"""A request's keys as tiles that share a turn, for queries to walk over. Host side, numpy."""

from dataclasses import dataclass

import numpy as np

from picbench.kernels.cuda.prefill.logical_order import Ints
from picbench.kernels.cuda.visible_blocks import Bools, VisibleBlocks
from picbench.kernels.paging import BLOCK_SIZE, GAP

#: Keys of a tile, and how many of the last may be hidden without a mask.
KEYS, LOOSE = 128, BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class KeyTiles:
    """Tiles of whole blocks with a turn in common, in compute order.

    `slots` and `kpos` [tiles, 128] int32 are the request's slots and their logical positions, -1
    and GAP where nothing is to be seen. `turns`, `lowest` and `highest` [tiles] int32 are the turn
    and the extreme positions. `shown` [tiles] int32 is how many keys are seen if those are the
    first and hidden ones fill less than a block; else `highest` is GAP, so that no query sees the
    tile as a whole.
    """

    slots: Ints
    kpos: Ints
    turns: Ints
    lowest: Ints
    highest: Ints
    shown: Ints

    @classmethod
    def of(cls, kpos: Ints, turns: Ints) -> "KeyTiles | None":
        """Tiles of the slots described by `kpos` and `turns` [slots] int32 in compute order.

        None where keys of one block differ in their turns, as they do where they rest unrotated.
        """
        entries = VisibleBlocks.closed(kpos, turns, KEYS // BLOCK_SIZE)
        if entries is None:
            return None
        lanes = np.arange(BLOCK_SIZE, dtype=np.int32)
        slots = (entries.blocks[:, :, None] * BLOCK_SIZE + lanes).reshape(-1, KEYS)
        inside = (slots >= 0) & (slots < len(kpos))
        at = np.where(inside, kpos[np.where(inside, slots, 0)], GAP).astype(np.int32)
        seen = at != GAP
        shown = seen.sum(1, dtype=np.int32)
        highest = np.where(seen, at, -1).max(1, initial=-1)
        return cls(
            np.where(seen, slots, -1).astype(np.int32),
            at,
            entries.turns,
            at.min(1, initial=GAP),
            np.where(_is_loose(seen, shown), highest, GAP).astype(np.int32),
            shown,
        )


def _is_loose(seen: Bools, shown: Ints) -> Bools:
    first = np.arange(KEYS) < shown[:, None]
    found: Bools = (shown >= KEYS - LOOSE) & (seen == first).all(1)
    return found
