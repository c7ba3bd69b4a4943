"""A request's keys in tiles of 128 that share a RoPE shift. Host side, numpy."""

from dataclasses import dataclass

import numpy as np

from picbench.kernels.cuda.visible_blocks import Bools, Ints, VisibleBlocks
from picbench.kernels.paging import BLOCK_SIZE, GAP

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
    def of(cls, kpos: Ints, rope_shift: Ints) -> "KeyTiles | None":
        """Tiles of the slots described by `kpos` and `rope_shift` [slots] int32 in compute order.

        None where the shifts differ within a block, as they do for keys cached without RoPE.
        """
        visible = VisibleBlocks.of_prompt(kpos, rope_shift, KEYS // BLOCK_SIZE)
        if visible is None:
            return None
        lanes = np.arange(BLOCK_SIZE, dtype=np.int32)
        slots = (visible.blocks[:, :, None] * BLOCK_SIZE + lanes).reshape(-1, KEYS)
        inside = (slots >= 0) & (slots < len(kpos))
        at = np.where(inside, kpos[np.where(inside, slots, 0)], GAP).astype(np.int32)
        seen = at != GAP
        shown = seen.sum(1, dtype=np.int32)
        highest = np.where(seen, at, -1).max(1, initial=-1)
        return cls(
            np.where(seen, slots, -1).astype(np.int32),
            at,
            visible.rope_shift,
            at.min(1, initial=GAP),
            np.where(_is_loose(seen, shown), highest, GAP).astype(np.int32),
            shown,
        )


def _is_loose(seen: Bools, shown: Ints) -> Bools:
    first = np.arange(KEYS) < shown[:, None]
    loose: Bools = (shown >= KEYS - LOOSE) & (seen == first).all(1)
    return loose
