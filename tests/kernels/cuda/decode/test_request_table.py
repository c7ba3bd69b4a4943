"""The device has what was put last for each row, whatever was put, cleared and flushed before."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from picbench.experiments.scenes import Slots, planned
from picbench.kernels.cuda.decode.request_table import RequestTable
from picbench.kernels.cuda.decode.shared.key_cells import cut_cells
from picbench.kernels.cuda.decode.shared.shared_table import SharedRequestTable
from picbench.kernels.cuda.decode.shared.sharing_costs import SharingCosts
from picbench.kernels.cuda.visible_blocks import CanonicalBlocks, VisibleBlocks
from picbench.kernels.shape import HeadShape

ROWS, BLOCKS = 3, 40

SCENES = (
    planned([20, 37], linked=7, text=5),
    planned([90], linked=16, text=30),
    planned([17, 17, 17], linked=0, text=1, anchor=7),
    planned([], linked=0, text=50),
)

#: A row and what is put there (None: it is cleared), or the end of a step.
Event = tuple[int, int | None] | None
EVENTS: st.SearchStrategy[list[Event]] = st.lists(
    st.none()
    | st.tuples(st.integers(0, ROWS - 1), st.none() | st.sampled_from(range(len(SCENES)))),
    max_size=20,
)


def play(table: RequestTable, events: list[Event]) -> dict[int, Slots]:
    """The requests that are left, all of them flushed."""
    left: dict[int, Slots] = {}
    for event in events:
        if event is None:
            table.flush()
            continue
        row, scene = event
        left.pop(row, None)
        if scene is None:
            table.clear(row)
        else:
            left[row] = SCENES[scene]
            table.put(row, left[row].kpos, left[row].rope_shift, canonical(left[row]))
    table.flush()
    return left


def canonical(slots: Slots) -> CanonicalBlocks:
    """The first blocks of a request, as if they were those of the pool as well."""
    blocks = len(slots.kpos) // 32
    return CanonicalBlocks(np.arange(blocks, dtype=np.int32), np.zeros(16 * blocks, np.int32))


def tiles_of(table: RequestTable, slots: Slots) -> VisibleBlocks:
    listed = len(canonical(slots).ids) if isinstance(table, SharedRequestTable) else 0
    kpos, shift = slots.kpos.numpy(), slots.rope_shift.numpy()
    return VisibleBlocks.of(kpos, shift, table.tile_blocks, listed)


@given(EVENTS)
def test_rows_are_those_that_were_put_last(events: list[Event]) -> None:
    table = RequestTable(ROWS, BLOCKS, "cpu")
    for row, slots in play(table, events).items():
        expect_tiles(table, row, tiles_of(table, slots))


@given(EVENTS)
def test_rows_name_the_cells_of_their_tiles(events: list[Event]) -> None:
    shape = HeadShape(8, 2, 64, torch.bfloat16)
    table = SharedRequestTable(ROWS, BLOCKS, "cpu", shape, costs=SharingCosts.always())
    for row, slots in play(table, events).items():
        visible = tiles_of(table, slots)
        expect_tiles(table, row, visible)
        cells = cut_cells(visible, canonical(slots).ids, table.layout.cell_blocks)
        assert int(table.cells[row]) == len(cells)
        named = np.full(table.max_tiles, -1)
        for ordinal, cell in enumerate(cells):
            named[cell.first : cell.last] = ordinal
        assert table.cell_of_tile[row].tolist() == named.tolist()


def expect_tiles(table: RequestTable, row: int, visible: VisibleBlocks) -> None:
    count = visible.blocks.size
    assert table.bounds[row].tolist() == [len(visible.blocks), visible.tail]
    assert table.blocks[row, :count].tolist() == visible.blocks.flatten().tolist()
    assert table.seen[row, :count].tolist() == visible.seen.flatten().tolist()
    # Tiles of the tail are read with a shift of 0, however many there will be.
    shifts = np.zeros(table.max_tiles)
    shifts[: len(visible.rope_shift)] = visible.rope_shift
    assert table.rope_shift[row].tolist() == shifts.tolist()


@pytest.mark.parametrize("shared", [False, True])
def test_a_step_without_changes_sends_nothing(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = HeadShape(8, 2, 64, torch.bfloat16)
    table = (
        SharedRequestTable(ROWS, BLOCKS, "cpu", shape)
        if shared
        else RequestTable(ROWS, BLOCKS, "cpu")
    )
    play(table, [(0, 1), None, (1, 2), (1, None)])
    monkeypatch.setattr("picbench.kernels.cuda.decode.request_table.write_rows", pytest.fail)
    table.flush()
