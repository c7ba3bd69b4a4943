"""Panels of papers: their size, and labels that neither overlap nor leave the frame."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from printed_figure import check_printed

from picbench.output.figures.figure_legend import legend_height
from picbench.output.figures.paper_canvas import Panel, spread
from picbench.output.figures.paper_panels import (
    Spot,
    draw_bars,
    draw_dots,
    draw_lines,
    draw_scatter,
    draw_time,
)

PANEL = Panel("x", "y", "Random weights, a machine. " * 4)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=8))
def test_labels_keep_their_distance_and_their_order(wanted: list[float]) -> None:
    placed = spread(wanted, 10, 0, 100)
    order = sorted(range(len(wanted)), key=lambda n: wanted[n])
    assert all(placed[b] - placed[a] >= 10 - 1e-9 for a, b in pairwise(order))
    assert max(placed) <= 100 + 1e-9


def test_labels_stay_where_there_is_room() -> None:
    assert spread([50, 10, 90], 10, 0, 100) == [50, 10, 90]


def spots(*values: float) -> list[Spot]:
    return [Spot(x + 1, value, value - 1, value + 2, f"n{x}") for x, value in enumerate(values)]


def test_every_kind_of_panel_is_a_column_wide(tmp_path: Path) -> None:
    lines = {f"arm {n}": spots(10 * n + 20, 10 * n + 30, 40) for n in range(5)}
    draw_lines(PANEL, lines, {1: "1", 2: "2", 3: "3"}, tmp_path / "lines")
    draw_scatter(Panel("x", "y", "n", log_x=True), lines, ["arm 1"], tmp_path / "scatter")
    rows = {"a-like": {"mepic": Spot(3, 0, 2, 4)}, "b-like": {"mepic": Spot(5, 0, 4, 6)}}
    draw_dots(PANEL, rows, rows, tmp_path / "dots")
    draw_bars(
        PANEL, {"mepic": Spot(3, 0, 2, 4), "epic:k=16": Spot(900, 0, 800, 950)}, tmp_path / "bars"
    )
    for name in ("lines", "scatter", "dots", "bars"):
        check_printed(tmp_path / name)


@pytest.mark.parametrize("arms", [1, 7])
@pytest.mark.parametrize("first", ["mepic", "mepic:anchored=on:context=document"])
def test_a_legend_fits_the_width_and_is_above_the_panels(
    first: str, arms: int, tmp_path: Path
) -> None:
    row = {name: Spot(3, 0, 2, 4) for name in (first, *(f"epic:k={n}" for n in range(1, arms)))}
    draw_dots(PANEL, {"a-like": row}, {}, tmp_path / "dots")
    check_printed(tmp_path / "dots")
    series = {name: ([0.0, 1.0], [0.0, 99.0]) for name in row}
    draw_time(PANEL, {"a-like": series}, tmp_path / "time")
    check_printed(tmp_path / "time")


def test_what_a_legend_needs_grows_with_its_lines() -> None:
    short = [f"arm{n}" for n in range(4)]
    assert legend_height(short) < legend_height([*short, "arm4"])
    assert legend_height(short) < legend_height([name * 6 for name in short])
