"""The blocks that each running request sees, kept on the device for decode."""

import numpy as np
import torch
from torch import Tensor

from picbench.errors import EngineError
from picbench.kernels.cuda.device import write_rows
from picbench.kernels.cuda.visible_blocks import CanonicalBlocks, Ints, VisibleBlocks
from picbench.kernels.paging import BLOCK_SIZE

#: Blocks of a tile: decode reads that many times 16 slots at once.
TILE_BLOCKS = 4


class RequestTable:
    """One row a request: its visible blocks (`VisibleBlocks`) and the RoPE shift of their keys.

    A row is written (`put`) when the request is admitted or planned again, and holds for every
    length that the request grows to. The device gets the rows of all requests that came since the
    last step at once (`flush`), in the order of the stream: the host may be ahead of it by a step.
    A table for keys cached without RoPE (`unrotated`) holds a shift a slot instead of one a tile.

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
        self._unsent: dict[int, list[Ints]] = {}

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
        """Has the next `flush` write a request's `row`.

        `kpos` and `rope_shift` [slots] are int32 on the CPU.

        Tables whose requests share what they read want the `canonical` blocks of each.

        `kpos` are logical positions in compute order, GAP for slots that no query may see. Slots
        after the last one given are visible and have shift 0; an unrotated table needs every slot
        that the request may ever have. Raises EngineError where the visible keys of one block
        differ in their shifts, and where the table is too small.
        """
        if self.unrotated:
            visible = VisibleBlocks.of_unrotated(kpos.numpy(), self.tile_blocks)
        else:
            visible = VisibleBlocks.of(kpos.numpy(), rope_shift.numpy(), self.tile_blocks)
        self._unsent[row] = self._tiles(visible, rope_shift)

    def flush(self) -> None:
        """Writes what was put since the last time to the device."""
        if self._unsent:
            write_rows(self._columns, self._unsent)
            self._unsent = {}

    @property
    def shares(self) -> bool:
        """Whether a step is faster if requests that decode read blocks together."""
        return False

    def clear(self, row: int) -> None:
        """The request of a row has ended; the row is not read until it is written again."""
        self._unsent.pop(row, None)

    @property
    def _columns(self) -> list[Tensor]:
        """What a row is written to."""
        return [self.blocks, self.seen, self.rope_shift, self.bounds]

    def _tiles(self, visible: VisibleBlocks, rope_shift: Tensor) -> list[Ints]:
        """What a row has in the columns of this class."""
        tiles = len(visible.blocks)
        if tiles > self.max_tiles:
            raise EngineError(
                f"{tiles} tiles of blocks exceed {self.max_tiles}",
                hint="size the request table for the engine's max_model_len",
            )
        bounds = np.array([tiles, visible.tail], np.int32)
        shifts = self._shifts(visible, rope_shift.numpy())
        return [visible.blocks.reshape(-1), visible.seen.reshape(-1), shifts, bounds]

    def _shifts(self, visible: VisibleBlocks, rope_shift: Ints) -> Ints:
        """Those of all tiles of a row, or slots; zeros for a tail of any length."""
        if self.unrotated:
            return self._slot_shifts(visible, rope_shift)
        shifts = np.zeros(self.max_tiles, np.int32)
        shifts[: len(visible.rope_shift)] = visible.rope_shift
        return shifts

    def _slot_shifts(self, visible: VisibleBlocks, rope_shift: Ints) -> Ints:
        slots = visible.slots(self.blocks.shape[1])
        inside = (slots >= 0) & (slots < len(rope_shift))
        return np.where(inside, rope_shift[np.where(inside, slots, 0)], 0).astype(np.int32)
