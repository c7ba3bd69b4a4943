"""The blocks that each running request sees, kept on the device for decode."""

import numpy as np
import torch
from torch import Tensor

from picbench.errors import EngineError
from picbench.kernels.cuda.device import overwrite_all
from picbench.kernels.cuda.visible_blocks import CanonicalBlocks, Ints, VisibleBlocks
from picbench.kernels.paging import BLOCK_SIZE

#: Blocks of a tile: decode reads that many times 16 slots at once.
TILE_BLOCKS = 4


class RequestTable:
    """One row a request: its visible blocks (`VisibleBlocks`) and the RoPE shift of their keys.

    A row is written when the request is admitted or planned anew, and holds for every length that
    the request grows to. A table for keys cached without RoPE (`unrotated`) holds a shift a slot
    instead of one a tile.

    Attributes, all int32 on the device: `blocks` and `seen` [rows, max_tiles * tile_blocks],
    `rope_shift` [rows, max_tiles], or [rows, max_tiles * tile_blocks * 16] if unrotated, and
    `bounds` [rows, 2]: the number of listed tiles, and the first block of the tail.
    """

    def __init__(
        self,
        max_requests: int,
        max_blocks: int,
        device: torch.device | str,
        *,
        unrotated: bool = False,
        tile_blocks: int = TILE_BLOCKS,
    ) -> None:
        # Every listed tile holds a block at least, so there are never more tiles than blocks.
        self.max_tiles = max_blocks + 1
        self.tile_blocks = tile_blocks
        self.unrotated = unrotated
        listed = self.max_tiles * tile_blocks
        shifts = listed * BLOCK_SIZE if unrotated else self.max_tiles

        def zeros(width: int) -> Tensor:
            return torch.zeros(max_requests, width, dtype=torch.int32, device=device)

        self.blocks, self.seen = zeros(listed), zeros(listed)
        self.rope_shift, self.bounds = zeros(shifts), zeros(2)

    @property
    def nbytes(self) -> int:
        """Device memory held."""
        return sum(t.nbytes for t in (self.blocks, self.seen, self.rope_shift, self.bounds))

    def put(
        self,
        row: int,
        kpos: Tensor,
        rope_shift: Tensor,
        canonical: CanonicalBlocks | None = None,
    ) -> None:
        """Writes a request's `row`; `kpos` and `rope_shift` [slots] are int32 on the CPU.

        Tables whose requests share what they read want the `canonical` blocks of each.

        `kpos` are logical positions in compute order, GAP for slots that no query may see. Slots
        after the last one given are visible and have shift 0; an unrotated table needs every slot
        that the request may ever have. Raises EngineError where the visible keys of one block
        differ in their shifts, and where the table is too small.
        """
        if self.unrotated:
            visible = VisibleBlocks.of_unrotated(kpos.numpy(), self.tile_blocks)
            self._write_tiles(row, visible, rope_shift)
        else:
            visible = VisibleBlocks.of(kpos.numpy(), rope_shift.numpy(), self.tile_blocks)
            self._write_tiles(row, visible, rope_shift)

    @property
    def shares(self) -> bool:
        """Whether a step is faster if requests that decode read blocks together."""
        return False

    def clear(self, row: int) -> None:
        """The request of a row has ended; the row is not read until it is written again."""

    def _write_tiles(self, row: int, visible: VisibleBlocks, rope_shift: Tensor) -> None:
        if self.unrotated:
            shifts = self._slot_shifts(visible, rope_shift.numpy())
        else:
            shifts = visible.rope_shift
        tiles = len(visible.blocks)
        if tiles > self.max_tiles:
            raise EngineError(
                f"{tiles} tiles of blocks exceed {self.max_tiles}",
                hint="size the request table for the engine's max_model_len",
            )
        bounds = np.array([tiles, visible.tail], np.int32)
        overwrite_all(
            [self.blocks[row], self.seen[row], self.rope_shift[row], self.bounds[row]],
            [visible.blocks.reshape(-1), visible.seen.reshape(-1), shifts, bounds],
        )

    def _slot_shifts(self, visible: VisibleBlocks, rope_shift: Ints) -> Ints:
        slots = visible.slots(self.blocks.shape[1])
        inside = (slots >= 0) & (slots < len(rope_shift))
        return np.where(inside, rope_shift[np.where(inside, slots, 0)], 0).astype(np.int32)
