"""Rows of the host tier: never two chunks in one, never freed while they are copied."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from picbench.engines.chunk_cache.arena import Arena, Extent, runs

ROW, ROWS = 10, 8
names = st.integers(0, 5).map(lambda number: bytes([number]))


class Books(RuleBasedStateMachine):
    """An arena beside what its users know: the rows that each of them may copy."""

    filling = Bundle("filling")
    reading = Bundle("reading")

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(ROW * ROWS + ROW - 1, ROW)
        self.users: list[Extent] = []
        self.readable: dict[bytes, Extent] = {}

    @rule(target=filling, name=names, count=st.integers(1, ROWS + 1))
    def reserve(self, name: bytes, count: int) -> object:
        if name in self.arena or self.arena.is_filling(name):
            return multiple()
        used = {row for extent in self.users for row in extent.rows}
        extent = self.arena.reserve(name, count)
        assert (extent is not None) == (count <= ROWS - len(used))
        if extent is None:
            return multiple()
        assert len(set(extent.rows)) == count
        assert not used.intersection(extent.rows)
        self.users.append(extent)
        return extent

    @rule(target=reading, extent=consumes(filling))
    def commit(self, extent: Extent) -> Extent:
        self.arena.commit(extent)
        if extent.listed:
            self.readable[extent.name] = extent
        return extent

    @rule(extent=consumes(filling))
    def give_up(self, extent: Extent) -> None:
        self.arena.release(extent)
        self.users.remove(extent)

    @rule(target=reading, name=names)
    def find(self, name: bytes) -> object:
        extent = self.arena.find(name, 1)
        if extent is None:
            return multiple()
        assert extent is self.readable[name]
        self.users.append(extent)
        return extent

    @rule(extent=consumes(reading))
    def release(self, extent: Extent) -> None:
        self.arena.release(extent)
        self.users.remove(extent)

    @rule()
    def clear(self) -> None:
        self.arena.clear()
        assert not any(bytes([number]) in self.arena for number in range(6))

    @invariant()
    def every_row_has_one_owner(self) -> None:
        listed = {id(e): e for name, e in self.readable.items() if name in self.arena}
        extents = listed | {id(e): e for e in self.users}
        owned = [row for extent in extents.values() for row in extent.rows]
        assert len(owned) == len(set(owned))
        assert set(owned) <= set(range(ROWS))
        assert self.arena.held_bytes == ROW * len(owned)
        assert len(self.arena._extents) == len(listed)


def test_no_row_is_reused_while_it_is_copied() -> None:
    chosen = settings(max_examples=150, stateful_step_count=40, deadline=None)
    run_state_machine_as_test(Books, settings=chosen)  # type: ignore[no-untyped-call]


def stored(arena: Arena, name: bytes, count: int) -> Extent:
    extent = arena.reserve(name, count)
    assert extent is not None
    arena.commit(extent)
    arena.release(extent)
    return extent


def read(arena: Arena, name: bytes) -> None:
    extent = arena.find(name, 1)
    assert extent is not None
    arena.release(extent)


@pytest.mark.parametrize("use", [Arena.touch, read])
def test_the_least_recently_used_chunk_makes_room(use: Callable[[Arena, bytes], object]) -> None:
    arena = Arena(ROW * 4, ROW)
    stored(arena, b"a", 2)
    stored(arena, b"b", 2)
    use(arena, b"a")
    stored(arena, b"c", 1)
    assert [name in arena for name in (b"a", b"b", b"c")] == [True, False, True]
    assert len(arena._extents) == 2
    assert not arena.touch(b"b")


def test_a_chunk_that_is_being_copied_stays() -> None:
    """Also if it was used longest ago: its rows would be no one's before the copy has ended."""
    arena = Arena(ROW * 4, ROW)
    stored(arena, b"a", 2)
    stored(arena, b"b", 2)
    copied = arena.find(b"a", 2)
    arena.touch(b"b")
    stored(arena, b"c", 2)
    assert [name in arena for name in (b"a", b"b", b"c")] == [True, False, True]
    assert copied is not None
    arena.release(copied)
    assert arena.find(b"a", 2) is copied


def test_nothing_is_evicted_for_what_does_not_fit() -> None:
    arena = Arena(ROW * 4, ROW)
    stored(arena, b"a", 2)
    held = arena.find(b"a", 2)
    stored(arena, b"b", 2)
    assert arena.find(b"c", 3) is None
    assert arena.reserve(b"c", 3) is None
    assert b"b" in arena
    assert held is not None
    counters = arena.counters()
    assert (counters.hits, counters.misses) == (1, 1)
    assert (counters.stored, counters.refused) == (2, 1)
    assert (counters.bytes_read, counters.bytes_written) == (2 * ROW, 4 * ROW)
    assert (len(arena._extents), arena.capacity) == (2, 4 * ROW)


def test_rows_of_an_evicted_chunk_are_reused_in_order() -> None:
    arena = Arena(ROW * 6, ROW)
    rows = stored(arena, b"a", 4).rows
    arena.clear()
    assert stored(arena, b"b", 4).rows == rows == (0, 1, 2, 3)


def test_what_was_being_filled_when_all_was_cleared_is_not_found() -> None:
    arena = Arena(ROW * 4, ROW)
    filling = arena.reserve(b"a", 4)
    assert filling is not None
    arena.clear()
    arena.commit(filling)
    assert b"a" not in arena
    arena.release(filling)
    assert arena.held_bytes == 0


def test_rows_of_a_copy_that_was_given_up_are_reused_in_order() -> None:
    arena = Arena(ROW * 4, ROW)
    given_up = arena.reserve(b"a", 4)
    assert given_up is not None
    arena.release(given_up)
    assert not arena.is_filling(b"a")
    assert stored(arena, b"b", 4).rows == given_up.rows


def test_runs_of_rows() -> None:
    assert list(runs([4, 5, 6, 2, 9, 10])) == [(4, 0, 3), (2, 3, 1), (9, 4, 2)]
    assert list(runs([])) == []
    assert list(runs(range(3))) == [(0, 0, 3)]
