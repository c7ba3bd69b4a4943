"""The request table of decode that reads shared blocks once: which tiles a group reads, and where.

Groups that changed are copied to the device with the next step that shares (`flush_groups`).
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from picbench.kernels.cuda.decode.request_table import RequestTable
from picbench.kernels.cuda.decode.shared.group_rows import GroupRows
from picbench.kernels.cuda.decode.shared.key_cells import KeyCell, block_starts, cut_cells
from picbench.kernels.cuda.decode.shared.reader_groups import ReaderGroups
from picbench.kernels.cuda.decode.shared.sharing_costs import SharingCosts
from picbench.kernels.cuda.device import upload_all
from picbench.kernels.cuda.visible_blocks import CanonicalBlocks, Ints, VisibleBlocks
from picbench.kernels.shape import HeadShape

#: Device memory for partial outputs of groups.
PARTS_BYTES = 128 << 20


class SharedRequestTable(RequestTable):
    """A request table, and the groups of requests that read the same cells.

    Attributes on the device besides, all int32: `cell_of_tile` [rows, max_tiles], -1 for tiles in
    no cell; `cells` [rows]; `part_of` [rows, max_cells] (`ReaderGroups`); `groups` [groups, width]
    (`GroupRows`), of which the first control[0] are read. With control[0] == 0 every request reads
    all of its tiles alone.
    """

    def __init__(
        self,
        max_requests: int,
        max_blocks: int,
        device: torch.device | str,
        shape: HeadShape,
        *,
        unrotated: bool = False,
        costs: SharingCosts | None = None,
        layout: GroupRows | None = None,
        parts_bytes: int = PARTS_BYTES,
    ) -> None:
        super().__init__(max_requests, max_blocks, device, unrotated=unrotated)
        self.shape, self.layout = shape, layout or GroupRows.of(shape.group)
        part = shape.num_heads * shape.head_size * shape.dtype.itemsize
        self.max_parts = min(parts_bytes // part, max_requests * self.max_tiles)
        # A group that pays has two readers at least.
        most = max(1, self.max_parts // 2)
        self.groups_of = ReaderGroups(
            max_requests,
            self.max_tiles,
            most,
            self.max_parts,
            shape,
            costs or SharingCosts(),
            self.layout,
        )
        ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.cell_of_tile = torch.full((max_requests, self.max_tiles), -1, **ints)
        self.cells = torch.zeros(max_requests, **ints)
        self.part_of = torch.full((max_requests, self.max_tiles), -1, **ints)
        self.groups = torch.zeros(most, self.layout.width, **ints)
        self.control = torch.zeros(16, **ints)
        self._used = 0

    @property
    def nbytes(self) -> int:
        """Device memory held."""
        own = (self.cell_of_tile, self.cells, self.part_of, self.groups, self.control)
        return super().nbytes + sum(t.nbytes for t in own)

    @property
    def shares(self) -> bool:
        """See `RequestTable.shares`."""
        return self.groups_of.pays

    def put(
        self,
        row: int,
        kpos: Tensor,
        rope_shift: Tensor,
        canonical: CanonicalBlocks | None = None,
    ) -> None:
        """See `RequestTable.put`; without `canonical` blocks the request reads all of its alone."""
        if canonical is None:
            canonical = CanonicalBlocks(np.zeros(0, np.int32), np.zeros(len(kpos), np.int32))
        known, listed = kpos.numpy(), len(canonical.ids)
        if self.unrotated:
            shift = np.zeros(len(known), np.int32)
            shift[: len(canonical.chunk_shift)] = canonical.chunk_shift
            visible = VisibleBlocks.of_unrotated(known, self.tile_blocks, shift, listed)
            starts = block_starts(known)
        else:
            visible = VisibleBlocks.of(known, rope_shift.numpy(), self.tile_blocks, listed)
            starts = None
        cells = cut_cells(visible, canonical.ids, self.layout.cell_blocks, starts)
        tiles = self._tiles(visible, rope_shift)
        self._unsent[row] = [*tiles, self._ordinals(cells), np.array([len(cells)], np.int32)]
        self.groups_of.add(row, cells)

    def clear(self, row: int) -> None:
        """See `RequestTable.clear`."""
        super().clear(row)
        self.groups_of.remove(row)

    def flush_groups(self) -> None:
        """Copies what changed of groups since the last time to the device."""
        changes = self.groups_of.take_changes()
        if changes is None:
            return
        used = self.groups_of.count if self.groups_of.pays else 0
        index, at = changes.index.astype(np.int32), changes.at.astype(np.int32)
        new = [index, changes.rows, at, changes.parts, np.array([used], np.int32)]
        groups, rows, places, parts, count = upload_all(new, self.groups.device)
        if len(index):
            self.groups.index_copy_(0, groups.long(), rows)
        if len(at):
            self.part_of.view(-1).index_copy_(0, places.long(), parts)
        if used != self._used:
            self.control[:1].copy_(count)
            self._used = used

    @property
    def _columns(self) -> list[Tensor]:
        return [*super()._columns, self.cell_of_tile, self.cells[:, None]]

    def _ordinals(self, cells: list[KeyCell]) -> Ints:
        """The cell of each tile of a row, -1 for none."""
        ordinals: Ints = np.full(self.max_tiles, -1, np.int32)
        for ordinal, cell in enumerate(cells):
            ordinals[cell.first : cell.last] = ordinal
        return ordinals
