"""What decode must know of each request for as long as it lives, on the device."""

import numpy as np
import torch
from torch import Tensor

from picbench.errors import EngineError
from picbench.kernels.cuda.visible_blocks import VisibleBlocks
from picbench.kernels.paging import BLOCK_SIZE

#: Blocks of a tile: decode reads that many slots * 16 at a time.
TILE_BLOCKS = 4


class RequestTable:
    """Persistent rows, one a request: which blocks it sees, and how far their keys are turned.

    A row is written once, when the request is admitted or planned anew, and holds for every length
    that the request grows to. `unrotated` tables serve keys that rest unrotated, and hold a turn a
    slot instead of one a tile.

    Attributes (int32): `blocks` and `seen` [rows, entries], `turns` [rows, tiles], or
    [rows, entries * 16] if unrotated, `bounds` [rows, 2]: listed tiles, and the first block behind.
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
        entries = self.max_tiles * tile_blocks
        turns = entries * BLOCK_SIZE if unrotated else self.max_tiles

        def zeros(width: int) -> Tensor:
            return torch.zeros(max_requests, width, dtype=torch.int32, device=device)

        self.blocks, self.seen = zeros(entries), zeros(entries)
        self.turns, self.bounds = zeros(turns), zeros(2)

    @property
    def nbytes(self) -> int:
        """Device memory held."""
        return sum(t.nbytes for t in (self.blocks, self.seen, self.turns, self.bounds))

    def put(self, row: int, kpos: Tensor, turns: Tensor) -> None:
        """Describes the request in `row`: `kpos` and `turns` [slots] int32 on the CPU.

        `kpos` are logical positions in compute order, GAP for slots that nobody sees. Slots behind
        the last one given are visible and have turn 0; an unrotated table wants every slot that
        the request may ever have. Raises EngineError where the keys of one block differ in turns.
        """
        if self.unrotated:
            entries = VisibleBlocks.of_unrotated(kpos.numpy(), self.tile_blocks)
            flat = self._slot_turns(entries, turns.numpy())
        else:
            entries = VisibleBlocks.of(kpos.numpy(), turns.numpy(), self.tile_blocks)
            flat = entries.turns
        tiles = len(entries.blocks)
        if tiles > self.max_tiles:
            raise EngineError(
                f"{tiles} tiles of blocks exceed {self.max_tiles}",
                hint="size the row table for the engine's max_model_len",
            )
        for target, source in (
            (self.blocks, entries.blocks.flatten()),
            (self.seen, entries.seen.flatten()),
            (self.turns, flat),
            (self.bounds, np.array([tiles, entries.tail], np.int32)),
        ):
            self._write(target[row], source)

    def _slot_turns(self, entries: VisibleBlocks, turns: np.ndarray) -> np.ndarray:
        slots = entries.slots(self.blocks.shape[1])
        inside = (slots >= 0) & (slots < len(turns))
        return np.where(inside, turns[np.where(inside, slots, 0)], 0).astype(np.int32)

    @staticmethod
    def _write(row: Tensor, values: np.ndarray) -> None:
        full = np.zeros(len(row), np.int32)
        full[: len(values)] = values
        host = torch.from_numpy(full)
        # From pinned memory the copy waits for nothing: requests are admitted ahead of the GPU.
        row.copy_(host.pin_memory() if row.is_cuda else host, non_blocking=True)
