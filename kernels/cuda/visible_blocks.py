"""The blocks that a request's tokens see, in tiles that share a RoPE shift. Host side, numpy."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from picbench.errors import EngineError
from picbench.kernels.paging import BLOCK_SIZE, GAP

Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]

_LANES = np.arange(BLOCK_SIZE, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class CanonicalBlocks:
    """What a request reads of chunks that were computed without it.

    `ids` are blocks of the pool, those of the first blocks of the request, which never change while
    it lives. `chunk_shift` [slots] int32 is by how much each slot's logical position exceeds the
    one at which its chunk was compiled; slots after the last one given are the request's own.
    """

    ids: Ints
    chunk_shift: Ints


@dataclass(frozen=True, slots=True)
class VisibleBlocks:
    """The blocks of a request that its generated tokens see, in compute order.

    `blocks` [tiles, width] int32 are indices into the request's block table, -1 where a tile is
    not full. Bit i of `seen` [tiles, width] int32 says whether slot i of the block is visible.
    `rope_shift` [tiles] int32 is that of all keys of a tile. Blocks from `tail` on are visible as a
    whole with shift 0 and are not listed: they follow in tiles of their own, to any length.
    """

    blocks: Ints
    seen: Ints
    rope_shift: Ints
    tail: int

    @classmethod
    def of(cls, kpos: Ints, rope_shift: Ints, width: int, listed: int = 0) -> "VisibleBlocks":
        """The blocks of a request whose prompt has these slots (`RequestTable.put`).

        The first `listed` blocks are listed in any case. Raises EngineError where visible slots of
        one block differ in their shifts.
        """
        visible = _paged(kpos) != GAP
        shift = _block_shifts(_paged(rope_shift), visible)
        if shift is None:
            raise EngineError(
                "keys of one block are cached at different distances from their logical positions",
                hint="canonical and computed tokens must not share a block",
            )
        return cls._gather(visible, shift, max(listed, _tail(visible, shift)), width)

    @classmethod
    def of_unrotated(
        cls, kpos: Ints, width: int, chunk_shift: Ints | None = None, listed: int = 0
    ) -> "VisibleBlocks":
        """The blocks of a request whose slots have a shift each; those of tiles are 0.

        With `chunk_shift` [slots], the same for all slots of a chunk, tiles end where chunks do,
        and have their chunk's. The first `listed` blocks are listed in any case.
        """
        visible = _paged(kpos) != GAP
        shift = None if chunk_shift is None else _block_shifts(_paged(chunk_shift), visible)
        if shift is None:
            shift = np.zeros(len(visible), np.int32)
        return cls._gather(visible, shift, max(listed, _tail(visible, shift)), width)

    @classmethod
    def _gather(cls, visible: Bools, shift: Ints, tail: int, width: int) -> "VisibleBlocks":
        kept = np.flatnonzero(visible[:tail].any(1))
        blocks, rope_shift = in_tiles(kept.astype(np.int32), shift[kept], width)
        bits = np.packbits(visible, axis=1, bitorder="little").view("<u2")[:, 0].astype(np.int32)
        seen = np.where(blocks >= 0, bits[blocks], 0).astype(np.int32)
        return cls(blocks, seen, rope_shift, tail)

    def slots(self, blocks: int) -> Ints:
        """The request's slots in the first `blocks` visible blocks [blocks * 16], -1 for none."""
        tail = np.arange(self.tail, self.tail + max(0, blocks - self.blocks.size))
        listed = np.concatenate([self.blocks.flatten(), tail])[:blocks].astype(np.int32)
        slots = listed[:, None] * BLOCK_SIZE + _LANES
        return np.where(listed[:, None] >= 0, slots, -1).flatten().astype(np.int32)


def in_tiles(blocks: Ints, rope_shift: Ints, width: int) -> tuple[Ints, Ints]:
    """Blocks [n] in tiles [tiles, width] of one RoPE shift each, -1 where a tile is not full, and
    the shifts [tiles]; `rope_shift` [n] is that of each block."""
    starts = _tile_starts(rope_shift, width)
    tiles = np.full((len(starts), width), -1, np.int32)
    counts = np.diff(starts, append=len(blocks))
    place = np.arange(len(blocks)) + np.repeat(np.arange(len(starts)) * width - starts, counts)
    tiles.reshape(-1)[place] = blocks
    return tiles, rope_shift[starts]


def _paged(slots: Ints) -> Ints:
    # Generated tokens fill the end of the last block: they are visible and have shift 0.
    paged = np.zeros(-(-len(slots) // BLOCK_SIZE) * BLOCK_SIZE, np.int32)
    paged[: len(slots)] = slots
    return paged.reshape(-1, BLOCK_SIZE)


def _block_shifts(rope_shift: Ints, visible: Bools) -> Ints | None:
    """The shift of each block's visible slots, 0 without any; None where those of one differ."""
    first = rope_shift[np.arange(len(rope_shift)), visible.argmax(1)]
    if ((rope_shift != first[:, None]) & visible).any():
        return None
    return np.where(visible.any(1), first, 0).astype(np.int32)


def _tail(visible: Bools, shift: Ints) -> int:
    special = np.flatnonzero(~visible.all(1) | (shift != 0))
    return int(special[-1]) + 1 if len(special) else 0


def _tile_starts(rope_shift: Ints, width: int) -> NDArray[np.int64]:
    count = len(rope_shift)
    first = np.flatnonzero(np.concatenate([[count > 0], np.diff(rope_shift) != 0]))
    tiles = -(-np.diff(first, append=count) // width)
    before = np.cumsum(tiles) - tiles
    starts: NDArray[np.int64] = np.repeat(first - before * width, tiles)
    starts += np.arange(len(starts)) * width
    return starts
