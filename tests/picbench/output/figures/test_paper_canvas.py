"""Panels of papers: their size, and labels that neither overlap nor leave the frame."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from picbench.output.figures.paper_canvas import FORMATS, Panel, spread
from picbench.output.figures.paper_panels import (
    Spot,
    draw_bars,
    draw_dots,
    draw_lines,
    draw_scatter,
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
        assert all((tmp_path / f"{name}.{kind}").stat().st_size > 1000 for kind in FORMATS)
        with Image.open(tmp_path / f"{name}.png") as image:
            assert image.size[0] == pytest.approx(85 / 25.4 * 300, abs=2)
            assert is_blank_at_the_frame(image), name


def is_blank_at_the_frame(image: Image.Image) -> bool:
    """Whether nothing is cut: all pixels at the edges are white."""
    grey = image.convert("L")
    width, height = grey.size
    edges = [(0, 0, width, 1), (0, height - 1, width, height), (0, 0, 1, height)]
    edges.append((width - 1, 0, width, height))
    return all(grey.crop(edge).getextrema() == (255, 255) for edge in edges)
