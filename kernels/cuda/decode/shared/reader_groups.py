"""Which requests read which cells together, kept up to date as requests come and go. Host side.

Adding and removing a request takes time in proportion to its own cells; a step in which none comes
or goes takes none. What the device has to know of it is kept in two arrays, of which only changed
rows are given out (`take_changes`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from picbench.kernels.cuda.decode.shared import sharing_costs
from picbench.kernels.cuda.decode.shared.group_rows import GroupRows
from picbench.kernels.cuda.decode.shared.key_cells import KeyCell
from picbench.kernels.cuda.decode.shared.sharing_costs import SharedReads, SharingCosts
from picbench.kernels.cuda.visible_blocks import Ints
from picbench.kernels.shape import HeadShape


@dataclass(slots=True, eq=False)
class CellReader:
    """One request that reads a cell: its row of the request table, and which of its cells it is.

    `part` is where its partial output is written; -1, with no group, if it reads the cell alone.
    """

    row: int
    ordinal: int
    shift: int
    cell: "SharedCell"
    group: "ReaderGroup | None" = None
    place: int = -1
    part: int = -1


@dataclass(slots=True, eq=False)
class ReaderGroup:
    """Readers whom one load of a cell serves: row `index` of the device's array of groups."""

    index: int
    readers: list[CellReader] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class SharedCell:
    """A cell and all its readers; all of its `groups` but the last are full.

    A group loads `blocks`, and `served` readers have one. Fewer than `least` read it alone.
    """

    contents: Ints
    blocks: int
    least: int
    alone: list[CellReader] = field(default_factory=list)
    groups: list[ReaderGroup] = field(default_factory=list)
    served: int = 0


@dataclass(frozen=True, slots=True)
class GroupChanges:
    """What is new: rows `index` [n] of the groups are `rows` [n, width]; and of `part_of`,
    elements `at` [m] are `parts` [m]."""

    index: NDArray[np.int64]
    rows: Ints
    at: NDArray[np.int64]
    parts: Ints


class ReaderGroups:
    """All cells of the requests that run, by contents.

    `rows` is the number of rows of the request table, `most_cells` of cells that a row may have;
    cells after these, and readers for whom there is no group (`most_groups`) or no place for a
    partial output (`most_parts`), are read alone. `part_of` [rows, most_cells] int32 is where the
    partial output of each cell of a row is, -1 if the row reads it alone.
    """

    def __init__(
        self,
        rows: int,
        most_cells: int,
        most_groups: int,
        most_parts: int,
        shape: HeadShape,
        costs: SharingCosts,
        layout: GroupRows,
    ) -> None:
        self.layout, self.shape, self.costs = layout, shape, costs
        self.most_cells = most_cells
        self.count = 0
        self._sums = [0, 0, 0, 0]
        self._query_rows = [
            sharing_costs.query_rows(readers, shape.group) for readers in range(layout.readers + 1)
        ]
        self.part_of: Ints = np.full((rows, most_cells), -1, np.int32)
        self._rows: Ints = np.zeros((most_groups, layout.width), np.int32)
        self._groups: list[ReaderGroup] = []
        self._owners: list[SharedCell] = []
        self._cells: dict[bytes, SharedCell] = {}
        self._read: dict[int, list[tuple[bytes, CellReader]]] = {}
        self._free = list(range(most_parts - 1, -1, -1))
        self._new_groups: set[int] = set()
        self._new_parts: set[tuple[int, int]] = set()
        self._least = cache(lambda blocks: sharing_costs.least_readers(blocks, shape, costs))

    @property
    def reads(self) -> SharedReads:
        """What all groups read."""
        return SharedReads(*self._sums)

    @property
    def pays(self) -> bool:
        """Whether a step is expected to be faster with these groups than without any."""
        return sharing_costs.pays(self.reads, self.shape, self.costs)

    @property
    def empty(self) -> bool:
        """Whether nothing is known of any request."""
        return not self._cells and not self._read

    def covered(self) -> list[tuple[int, int, bytes, int]]:
        """Row, ordinal, cell and shift of every reader, as often as groups serve it."""
        return [
            (reader.row, reader.ordinal, owner.contents.tobytes(), reader.shift)
            for group, owner in zip(self._groups, self._owners, strict=True)
            for reader in group.readers
        ]

    def group_rows(self) -> Ints:
        """All groups [count, width] as the device has to know them (`GroupRows`)."""
        return self._rows[: self.count]

    def add(self, row: int, cells: Sequence[KeyCell]) -> None:
        """The request in `row` reads these cells, and no longer those that it read before."""
        self.remove(row)
        read = self._read[row] = []
        for ordinal, cell in enumerate(cells[: self.most_cells]):
            known = self._cells.get(cell.key)
            if known is None:
                blocks = cell.blocks
                known = SharedCell(cell.contents, blocks, self._least(blocks))
                self._cells[cell.key] = known
            reader = CellReader(row, ordinal, cell.shift, known)
            read.append((cell.key, reader))
            known.alone.append(reader)
            self._gather(known)

    def remove(self, row: int) -> None:
        """The request in `row` reads nothing any more."""
        for key, reader in self._read.pop(row, ()):
            cell = reader.cell
            if reader.group is None:
                cell.alone.remove(reader)
            else:
                self._leave(reader)
                self._dissolve(cell)
            if not cell.alone and not cell.groups:
                del self._cells[key]

    def take_changes(self) -> GroupChanges | None:
        """What changed since this was last asked; None if nothing did."""
        if not self._new_groups and not self._new_parts:
            return None
        index = np.array([i for i in self._new_groups if i < self.count], np.int64)
        at = np.array([row * self.most_cells + i for row, i in self._new_parts], np.int64)
        self._new_groups, self._new_parts = set(), set()
        return GroupChanges(index, self._rows[index], at, self.part_of.reshape(-1)[at])

    def _gather(self, cell: SharedCell) -> None:
        """Groups the readers that read the cell alone, if there are enough of them."""
        if not cell.served and len(cell.alone) < cell.least:
            return
        while cell.alone and len(self._free) >= (1 if cell.served else 2):
            if not cell.groups or len(cell.groups[-1].readers) == self.layout.readers:
                if self.count == len(self._rows):
                    return
                self._open(cell)
            self._join(cell.alone.pop(), cell.groups[-1])

    def _dissolve(self, cell: SharedCell) -> None:
        """Has the last readers of a cell read it alone again, if they are too few."""
        if cell.served >= cell.least:
            return
        while cell.groups:
            reader = cell.groups[-1].readers[-1]
            self._leave(reader)
            cell.alone.append(reader)

    def _open(self, cell: SharedCell) -> None:
        layout, row = self.layout, self._rows[self.count]
        row[0], row[1] = cell.blocks, 0
        for at, values in zip(
            (layout.blocks_at, layout.seen_at, layout.offsets_at), cell.contents, strict=True
        ):
            # The kernel may read on to the end of a wider tile.
            row[at : at + cell.blocks] = values
            row[at + cell.blocks : at + layout.cell_blocks] = 0
        group = ReaderGroup(self.count)
        cell.groups.append(group)
        self._groups.append(group)
        self._owners.append(cell)
        self.count += 1

    def _join(self, reader: CellReader, group: ReaderGroup) -> None:
        blocks = reader.cell.blocks
        self._account(group, blocks, -1)
        reader.part = self._free.pop()
        self._seat(reader, group, len(group.readers))
        group.readers.append(reader)
        self._rows[group.index, 1] = len(group.readers)
        reader.cell.served += 1
        self._tell(reader)
        self._account(group, blocks, 1)

    def _leave(self, reader: CellReader) -> None:
        """Takes a reader out of its group; the cell's last one takes its place."""
        cell, group, place = reader.cell, reader.group, reader.place
        assert group is not None
        last = cell.groups[-1]
        self._account(last, cell.blocks, -1)
        moved = last.readers.pop()
        self._rows[last.index, 1] = len(last.readers)
        cell.served -= 1
        self._new_groups.add(last.index)
        if moved is not reader:
            group.readers[place] = moved
            self._seat(moved, group, place)
        self._account(last, cell.blocks, 1)
        if not last.readers:
            cell.groups.pop()
            self._close(last)
        self._free.append(reader.part)
        reader.group, reader.place, reader.part = None, -1, -1
        self._tell(reader)

    def _close(self, group: ReaderGroup) -> None:
        """Removes a group; the last one of all takes its row."""
        self.count -= 1
        moved, owner = self._groups.pop(), self._owners.pop()
        if moved is not group:
            self._groups[group.index], self._owners[group.index] = moved, owner
            self._rows[group.index] = self._rows[self.count]
            moved.index = group.index
            self._new_groups.add(group.index)

    def _seat(self, reader: CellReader, group: ReaderGroup, place: int) -> None:
        layout, row = self.layout, self._rows[group.index]
        reader.group, reader.place = group, place
        row[layout.rows_at + place] = reader.row
        row[layout.shifts_at + place] = reader.shift
        row[layout.parts_at + place] = reader.part
        self._new_groups.add(group.index)

    def _tell(self, reader: CellReader) -> None:
        self.part_of[reader.row, reader.ordinal] = reader.part
        self._new_parts.add((reader.row, reader.ordinal))

    def _account(self, group: ReaderGroup, blocks: int, sign: int) -> None:
        """Adds or takes away what a group reads (`SharedReads.plus`)."""
        readers, sums = len(group.readers), self._sums
        blocks *= sign
        sums[0] += blocks * readers
        sums[1] += blocks if readers else 0
        sums[2] += blocks * self._query_rows[readers]
        sums[3] += sign * readers
