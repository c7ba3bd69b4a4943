"""Readers of cells: each is served once, however requests came and went."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from picbench.kernels.cuda.decode.shared.group_rows import GroupRows
from picbench.kernels.cuda.decode.shared.key_cells import KeyCell, cut_cells
from picbench.kernels.cuda.decode.shared.reader_groups import ReaderGroups
from picbench.kernels.cuda.decode.shared.sharing_costs import SharingCosts
from picbench.kernels.cuda.visible_blocks import VisibleBlocks
from picbench.kernels.paging import BLOCK_SIZE, GAP
from picbench.kernels.shape import HeadShape

SHAPE = HeadShape(8, 2, 64, torch.bfloat16)
ROWS = 6
MOST_CELLS = 8
#: Two readers are enough.
EAGER = SharingCosts(own_gb_ms=1e-6, launch_ms=0.0)


def cell(chunk: int, shift: int = 0) -> KeyCell:
    """The only cell of a chunk, of one to four blocks."""
    size = 4 - chunk % 4
    contents = np.stack([np.arange(1, 1 + size) + 4 * chunk, np.full(size, 0xFFFF), np.ones(size)])
    contents = contents.astype(np.int32)
    return KeyCell(contents.tobytes(), contents, 0, 1, shift)


def groups(
    *, readers: int = 3, most_groups: int = 100, most_parts: int = 100, costs: SharingCosts = EAGER
) -> ReaderGroups:
    layout = replace(GroupRows.of(SHAPE.group, 4), readers=readers)
    return ReaderGroups(ROWS, MOST_CELLS, most_groups, most_parts, SHAPE, costs, layout)


Step = tuple[int, list[tuple[int, int]] | None]

#: Rows that come (with chunks at shifts) or go (None).
STEPS: st.SearchStrategy[list[Step]] = st.lists(
    st.tuples(
        st.integers(0, ROWS - 1),
        st.none() | st.lists(st.tuples(st.integers(0, 4), st.integers(-9, 9)), max_size=9),
    ),
    max_size=25,
)


def play(made: ReaderGroups, steps: list[Step]) -> dict[int, list[tuple[int, int]]]:
    """The requests that are left."""
    left = {}
    for row, chunks in steps:
        left.pop(row, None)
        if chunks is None:
            made.remove(row)
        else:
            made.add(row, [cell(chunk, shift) for chunk, shift in chunks])
            left[row] = chunks
    return left


def wanted(left: dict[int, list[tuple[int, int]]]) -> set[tuple[int, int, bytes, int]]:
    """Every reader of a cell that has two or more."""
    reads = [
        (row, ordinal, cell(chunk).key, shift)
        for row, chunks in left.items()
        for ordinal, (chunk, shift) in enumerate(chunks[:MOST_CELLS])
    ]
    degrees = Counter(key for _, _, key, _ in reads)
    return {read for read in reads if degrees[read[2]] > 1}


def served(made: ReaderGroups) -> list[tuple[int, int, bytes, int]]:
    """What the device is told: readers by their partial outputs, found in `part_of`."""
    layout = made.layout
    places = {int(part): at for at, part in np.ndenumerate(made.part_of) if part >= 0}
    found = []
    for row in made.group_rows():
        blocks, readers = int(row[0]), int(row[1])
        assert 1 <= readers <= layout.readers
        columns = (layout.blocks_at, layout.seen_at, layout.offsets_at)
        contents = np.stack([row[at : at + blocks] for at in columns])
        # The kernel may read on: nothing is left of a larger cell that the row told of before.
        assert not any(row[at + blocks : at + layout.cell_blocks].any() for at in columns)
        for i in range(readers):
            part = int(row[layout.parts_at + i])
            at = places.pop(part)
            assert at[0] == row[layout.rows_at + i]
            found.append((*at, contents.tobytes(), int(row[layout.shifts_at + i])))
    assert not places
    return found


@given(STEPS)
def test_every_reader_of_a_shared_cell_is_served_once(steps: list[Step]) -> None:
    made = groups()
    left = play(made, steps)
    found = served(made)
    assert Counter(found) == Counter(wanted(left))
    assert Counter(made.covered()) == Counter(found)


@given(STEPS, st.integers(0, 3), st.integers(0, 7))
def test_without_room_readers_read_alone(steps: list[Step], most: int, parts: int) -> None:
    made = groups(most_groups=most, most_parts=parts)
    left = play(made, steps)
    found = served(made)
    assert len(found) == len(set(found)) <= parts
    assert set(found) <= wanted(left)


@given(STEPS)
def test_groups_do_not_depend_on_what_was_before(steps: list[Step]) -> None:
    made, anew = groups(), groups()
    left = play(made, steps)
    for row, chunks in left.items():
        anew.add(row, [cell(chunk, shift) for chunk, shift in chunks])
    assert Counter(served(made)) == Counter(served(anew))
    assert made.count == anew.count
    assert made.reads == anew.reads


@given(STEPS)
def test_nothing_is_left_once_all_have_gone(steps: list[Step]) -> None:
    made = groups()
    for row in play(made, steps):
        made.remove(row)
    assert made.empty
    assert made.count == 0
    assert made.reads == groups().reads
    assert (made.part_of == -1).all()
    made.add(0, [cell(0)] * 2)
    assert len(served(made)) == 2


@given(STEPS, st.data())
def test_the_changes_make_a_copy_equal(steps: list[Step], data: st.DataObject) -> None:
    made = groups(most_groups=5)
    rows, parts = np.zeros((5, made.layout.width), np.int32), made.part_of.copy()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(steps)), max_size=4)))
    for start, stop in zip([0, *cuts], [*cuts, len(steps)], strict=True):
        play(made, steps[start:stop])
        changes = made.take_changes()
        assert made.take_changes() is None
        if changes is not None:
            rows[changes.index] = changes.rows
            parts.reshape(-1)[changes.at] = changes.parts
        assert np.array_equal(rows[: made.count], made.group_rows())
        assert np.array_equal(parts, made.part_of)


def test_cells_with_few_readers_wait_for_more() -> None:
    costs = SharingCosts(parts_gb_ms=0.01)
    made = groups(costs=costs)
    for row in range(ROWS):
        made.add(row, [cell(0, row)])
    assert made.count == 0
    assert not made.pays


def test_a_request_may_read_a_chunk_twice() -> None:
    made = groups()
    made.add(2, [cell(1, 5), cell(0), cell(1, 70)])
    assert sorted(found[0::3] for found in served(made)) == [(2, 5), (2, 70)]


@st.composite
def requests(draw: st.DrawFn) -> tuple[VisibleBlocks, int]:
    """Chunks of whole blocks at shifts, some slots hidden, then blocks of the request's own."""
    kpos, shift = [], []
    for _ in range(draw(st.integers(0, 4))):
        length, at = draw(st.integers(1, 150)), draw(st.integers(0, 900))
        whole = -(-length // BLOCK_SIZE) * BLOCK_SIZE
        slots = np.arange(at, at + whole)
        slots[length:] = GAP
        for hidden in draw(st.lists(st.integers(0, whole - 1), max_size=20)):
            slots[hidden] = GAP
        kpos.append(slots)
        shift.append(np.full(whole, at))
    canonical = sum(map(len, kpos)) // BLOCK_SIZE
    own = draw(st.integers(1, 40))
    positions = np.concatenate([*kpos, np.arange(own)]).astype(np.int32)
    shifts = np.concatenate([*shift, np.zeros(own)]).astype(np.int32)
    return VisibleBlocks.of(positions, shifts, 4, canonical), canonical


@given(requests(), st.sampled_from([4, 8, 32]))
def test_each_visible_canonical_block_is_in_one_cell(
    request: tuple[VisibleBlocks, int], size: int
) -> None:
    visible, canonical = request
    ids = np.arange(100, 100 + canonical, dtype=np.int32)
    cells = cut_cells(visible, ids, size)
    tiles = [tile for cell in cells for tile in range(cell.first, cell.last)]
    assert len(tiles) == len(set(tiles))
    found = [
        (int(block), int(bits), cell.shift)
        for cell in cells
        for block, bits in cell.contents[:2].T
        if bits
    ]
    wanted = [
        (100 + int(block), int(bits), int(shift))
        for blocks, seen, shift in zip(
            visible.blocks, visible.seen, visible.rope_shift, strict=True
        )
        for block, bits in zip(blocks, seen, strict=True)
        if 0 <= block < canonical
    ]
    assert Counter(found) == Counter(wanted)
    assert all(cell.blocks <= size for cell in cells)


@pytest.mark.parametrize("before", [0, 5])
def test_cells_of_a_chunk_do_not_depend_on_what_is_before_it(before: int) -> None:
    chunk = np.arange(40 * BLOCK_SIZE, dtype=np.int32)
    other = np.arange(before * BLOCK_SIZE, dtype=np.int32)
    kpos = np.concatenate([other, chunk + len(other)]).astype(np.int32)
    shift = np.concatenate([np.zeros_like(other), np.full_like(chunk, len(other))])
    ids = np.concatenate([np.arange(900, 900 + before), np.arange(40)]).astype(np.int32)
    cells = cut_cells(VisibleBlocks.of(kpos, shift, 4, len(ids)), ids, 32)
    own = [cell.contents[0].tolist() for cell in cells if cell.contents[0, 0] < 900]
    assert own == [list(range(32)), list(range(32, 40))]
