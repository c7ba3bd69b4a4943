"""Rows told apart by where the answer lies."""

from dataclasses import replace

import pytest

from picbench.experiments.depth import CUTS, RowPlace, bins_of, heat_map, mean_of

CUT_OF = {cut.name: cut for cut in CUTS}


def place(**known: float | int) -> RowPlace:
    return replace(RowPlace(100), **known)  # type: ignore[arg-type]


def test_every_cut_has_a_label_for_each_of_its_edges() -> None:
    for cut in CUTS:
        assert len(cut.labels) == len(cut.edges) == len(set(cut.edges))
        assert list(cut.edges) == sorted(cut.edges)


def test_bins_end_where_the_next_one_begins() -> None:
    cut = CUT_OF["needle-chunk"]
    assert cut.label(place(into_chunk=15)) == "0-15"
    assert cut.label(place(into_chunk=16)) == "16-127"
    assert cut.label(place(into_chunk=9999)) == "384 on"
    assert cut.label(place(hops=2)) is None


def test_arms_are_averaged_on_the_same_rows() -> None:
    rows = [(place(hops=hops), {"a": score, "b": 1.0}) for hops, score in [(2, 1.0), (2, 0.0)]]
    rows.append((place(hops=4), {"a": 0.5, "b": 1.0}))
    two, four = bins_of(CUT_OF["hops"], rows, ("a", "b"))
    assert (two.label, two.rows, two.scores["a"].value) == ("2", 2, 0.5)
    assert two.scores["a"].low < 0.5 < two.scores["a"].high
    assert (two.scores["b"].low, two.scores["b"].high) == (1.0, 1.0)
    # One row tells nothing about others.
    assert (four.scores["a"].value, four.scores["a"].low, four.scores["a"].high) == (0.5, 0, 1)
    assert mean_of([0.25]).value == 0.25


def test_a_heat_map_has_depth_downwards_and_length_to_the_right() -> None:
    rows = [
        (place(depth=depth, length=length), {"a": depth + length})
        for depth in (0.0, 1.0)
        for length in (10, 30, 20)
    ]
    assert heat_map(rows, "a", (2, 3)) == [[10.0, 20.0, 30.0], [11.0, 21.0, 31.0]]
    empty = heat_map(rows[:1], "a", (1, 2))
    assert empty[0][0] == 10.0
    assert empty[0][1] != pytest.approx(10.0)
