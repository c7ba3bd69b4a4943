"""Panels of papers: a column wide, with letters that can be read, and nothing that is cut."""

from pathlib import Path

import pytest
from printed_figure import check_printed

from picbench.figures.canvas import Panel
from picbench.figures.panels import (
    Spot,
    draw_bars,
    draw_dots,
    draw_lines,
    draw_scatter,
    draw_time,
    percent_floor,
)

PANEL = Panel("x", "y", "Random weights, a machine. " * 4)


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
@pytest.mark.parametrize("first", ["mepic", "mepic:anchor=head:context=document"])
def test_a_legend_fits_the_width_and_is_above_the_panels(
    first: str, arms: int, tmp_path: Path
) -> None:
    row = {name: Spot(3, 0, 2, 4) for name in (first, *(f"epic:k={n}" for n in range(1, arms)))}
    draw_dots(PANEL, {"a-like": row}, {}, tmp_path / "dots")
    check_printed(tmp_path / "dots")
    series = {name: ([0.0, 1.0], [0.0, 99.0]) for name in row}
    draw_time(PANEL, {"a-like": series}, tmp_path / "time")
    check_printed(tmp_path / "time")


def test_a_scatter_says_in_its_legend_what_markers_are(tmp_path: Path) -> None:
    """Beside points there is no room for names of arms."""
    families = {"full": spots(90), "epic, k = 2 to 64": spots(60, 70, 80)}
    printed = {"full": spots(95)}
    draw_scatter(Panel("x", "y", "n"), families, ["epic, k = 2 to 64"], tmp_path / "s", printed)
    text = check_printed(tmp_path / "s")
    for name in ("full", "epic, k = 2 to 64", "hollow: paper"):
        assert f">{name}<" in text


@pytest.mark.parametrize(
    ("most", "named", "left_out"),
    [(75.0, ("20", "50", "100"), "30"), (2300.0, ("100", "1,000"), "200")],
)
def test_a_logarithmic_axis_has_as_many_names_as_there_is_room_for(
    most: float, named: tuple[str, ...], left_out: str, tmp_path: Path
) -> None:
    values = {"cacheblend:r=0.5": 25.0, "full": most}
    bars = {name: Spot(x, 0, x, x) for name, x in values.items()}
    draw_bars(Panel("x", "y", "n", log_x=True), bars, tmp_path / "bars")
    text = check_printed(tmp_path / "bars")
    assert all(f">{name}<" in text for name in named)
    assert f">{left_out}<" not in text


def test_bars_are_named_with_three_digits(tmp_path: Path) -> None:
    values = {"a": 26.0, "b": 99.96, "c": 1234.5}
    draw_bars(PANEL, {name: Spot(x, 0, x, x) for name, x in values.items()}, tmp_path / "bars")
    text = check_printed(tmp_path / "bars")
    assert all(f">{value}<" in text for value in ("26.0", "100", "1,234"))


def test_an_axis_of_percents_begins_below_all_bars() -> None:
    assert percent_floor([spots(75, 88), spots(62)]) == 60
    assert percent_floor([spots(99)]) == 90
