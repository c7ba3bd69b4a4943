"""A request's slots as decode reads them: blocks in tiles that share a turn. Host side, numpy."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from picbench.errors import EngineError
from picbench.kernels.paging import BLOCK_SIZE, GAP

Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]

_LANES = np.arange(BLOCK_SIZE, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class VisibleBlocks:
    """The blocks of a request that its generated tokens see, in compute order.

    `blocks` [tiles, width] int32 are indices into the request's block table, -1 where a tile is
    not full. Bit i of `seen` [tiles, width] int32 says whether slot i of the block is visible.
    `turns` [tiles] int32 is what all keys of a tile share. Blocks from `tail` on are wholly
    visible, have turn 0 and are not listed: they follow in tiles of their own, to any length.
    """

    blocks: Ints
    seen: Ints
    turns: Ints
    tail: int

    @classmethod
    def of(cls, kpos: Ints, turns: Ints, width: int) -> "VisibleBlocks":
        """VisibleBlocks of a request whose prompt has these slots (`RequestTable.put`).

        Raises EngineError where visible slots of one block differ in their turns.
        """
        visible = _paged(kpos) != GAP
        turn = _block_turns(_paged(turns), visible)
        if turn is None:
            raise EngineError(
                "keys of one block rest at different distances from their logical positions",
                hint="canonical and computed tokens must not share a block",
            )
        return cls._gather(visible, turn, _tail(visible, turn), width)

    @classmethod
    def closed(cls, kpos: Ints, turns: Ints, width: int) -> "VisibleBlocks | None":
        """VisibleBlocks of these slots alone, behind which nothing is generated.

        None where visible slots of one block differ in their turns.
        """
        visible = _paged(kpos, GAP) != GAP
        turn = _block_turns(_paged(turns), visible)
        return None if turn is None else cls._gather(visible, turn, len(visible), width)

    @classmethod
    def of_unrotated(cls, kpos: Ints, width: int) -> "VisibleBlocks":
        """VisibleBlocks of a request whose slots all have turns of their own; tiles have none."""
        visible = _paged(kpos) != GAP
        turn = np.zeros(len(visible), np.int32)
        return cls._gather(visible, turn, _tail(visible, turn), width)

    @classmethod
    def _gather(cls, visible: Bools, turn: Ints, tail: int, width: int) -> "VisibleBlocks":
        kept = np.flatnonzero(visible[:tail].any(1))
        starts = _tile_starts(turn[kept], width)
        blocks = np.full((len(starts), width), -1, np.int32)
        tile = np.searchsorted(starts, np.arange(len(kept)), side="right") - 1
        blocks[tile, np.arange(len(kept)) - np.array(starts, int)[tile]] = kept
        bits = (visible.astype(np.int32) << _LANES).sum(1, dtype=np.int32)
        seen = np.where(blocks >= 0, bits[blocks], 0).astype(np.int32)
        return cls(blocks, seen, turn[kept[starts]], tail)

    def slots(self, blocks: int) -> Ints:
        """The request's slot at each place of the first `blocks` entries [blocks * 16], or -1."""
        tail = np.arange(self.tail, self.tail + max(0, blocks - self.blocks.size))
        entries = np.concatenate([self.blocks.flatten(), tail])[:blocks].astype(np.int32)
        slots = entries[:, None] * BLOCK_SIZE + _LANES
        return np.where(entries[:, None] >= 0, slots, -1).flatten().astype(np.int32)


def _paged(slots: Ints, rest: int = 0) -> Ints:
    # Generated tokens fill the rest of the last block: they are visible and have turn 0.
    paged = np.full(-(-len(slots) // BLOCK_SIZE) * BLOCK_SIZE, rest, np.int32)
    paged[: len(slots)] = slots
    return paged.reshape(-1, BLOCK_SIZE)


def _block_turns(turns: Ints, visible: Bools) -> Ints | None:
    """The turn of each block's visible slots, 0 without any; None where those of one differ."""
    first = turns[np.arange(len(turns)), visible.argmax(1)]
    if ((turns != first[:, None]) & visible).any():
        return None
    return np.where(visible.any(1), first, 0).astype(np.int32)


def _tail(visible: Bools, turn: Ints) -> int:
    special = np.flatnonzero(~visible.all(1) | (turn != 0))
    return int(special[-1]) + 1 if len(special) else 0


def _tile_starts(turns: Ints, width: int) -> list[int]:
    if not len(turns):
        return []
    bounds = [0, *(np.flatnonzero(np.diff(turns)) + 1).tolist(), len(turns)]
    return [start for first, last in pairwise(bounds) for start in range(first, last, width)]
