"""Runs say of each slot what was said of them one by one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from picbench.kernels.paging import GAP
from picbench.kernels.slot_runs import SlotRuns

PIECES = st.lists(
    st.tuples(st.one_of(st.just(GAP), st.integers(0, 90)), st.integers(1, 9), st.integers(-4, 4)),
    max_size=9,
)


def slots_of(pieces: list[tuple[int, int, int]]) -> tuple[list[int], list[int]]:
    """Positions and shifts of slots in runs: first position, how many, and their shift."""
    kpos = [GAP if at == GAP else at + i for at, count, _ in pieces for i in range(count)]
    return kpos, [shift for _, count, shift in pieces for _ in range(count)]


@given(pieces=PIECES, bounds=st.tuples(st.integers(0, 90), st.integers(0, 90)))
def test_runs_keep_positions_and_shifts(
    pieces: list[tuple[int, int, int]], bounds: tuple[int, int]
) -> None:
    kpos, shifts = slots_of(pieces)
    runs = SlotRuns.of(np.array(kpos, np.int32), np.array(shifts, np.int32))
    start, stop = (min(bound, len(kpos)) for bound in sorted(bounds))
    assert len(runs) == len(kpos)
    assert runs.kpos(start, stop).tolist() == kpos[start:stop]
    found = runs.shifts(start, stop).tolist()
    visible = [at != GAP for at in kpos[start:stop]]
    assert [shift for shift, seen in zip(found, visible, strict=True) if seen] == [
        shift for shift, seen in zip(shifts[start:stop], visible, strict=True) if seen
    ]


@given(pieces=PIECES)
def test_keys_without_rope_are_shifted_by_their_positions(
    pieces: list[tuple[int, int, int]],
) -> None:
    kpos, shifts = slots_of(pieces)
    wanted = [at if at != GAP else 0 for at in kpos]
    runs = SlotRuns.of(np.array(kpos, np.int32), np.array(shifts, np.int32))
    assert runs.unrotated().shifts(0, len(kpos)).tolist() == wanted
    again = SlotRuns.of(np.array(kpos, np.int32), np.array(wanted, np.int32))
    assert again.shifts(0, len(kpos)).tolist() == wanted


def test_a_prompt_has_as_many_runs_as_it_has_breaks() -> None:
    kpos = np.array([4, 5, 6, GAP, GAP, 0, 1, 2], np.int32)
    shifts = np.array([4, 4, 4, 0, 0, 0, 0, 0], np.int32)
    assert SlotRuns.of(kpos, shifts).counts.tolist() == [3, 2, 3]
    assert SlotRuns.plain(7).kpos(2, 5).tolist() == [2, 3, 4]
