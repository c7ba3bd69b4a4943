"""How figures look and are written; labels neither overlap nor leave the frame."""

from pathlib import Path

import pytest
from full_disk import largest_file
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from picbench.engines.ledger import KINDS
from picbench.figures.canvas import (
    PALETTE,
    Panel,
    arm_styles,
    canvas,
    drawing,
    kind_colours,
    label_points,
    log_steps,
    write,
)

CAPTION = "cpu: a machine. testbed model, synthetic rows. 3 requests an arm, seeds 1."


def test_figures_that_do_not_fit_are_not_there(tmp_path: Path) -> None:
    """They were torn, or empty files of their names."""
    panel = Panel("x", "y", "note")
    too_large = pytest.raises(OSError, match="too large")
    with drawing() as figure, largest_file(500), too_large as caught:
        write(figure, CAPTION, tmp_path / "a")
    assert caught.value.filename == str(tmp_path / "a.svg")
    with largest_file(500), too_large as caught, canvas(panel, tmp_path / "b"):
        pass
    assert caught.value.filename == str(tmp_path / "b.png")
    assert list(tmp_path.iterdir()) == []


def test_captions_have_names_of_folders_as_they_are(tmp_path: Path) -> None:
    """Dollars began a formula, and what the font lacks ended in a warning."""
    caption = "runs of $\\q{HOME}$ in 運"
    with drawing() as figure:
        write(figure, caption, tmp_path / "load")
    assert f">{caption}<" in (tmp_path / "load.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize("count", [1, 5, 8])
def test_arms_and_kinds_have_colours_of_their_own(count: int) -> None:
    styles = arm_styles([f"arm{n}" for n in range(count)])
    assert len(set(styles.values())) == count
    colours = kind_colours()
    assert set(colours) == set(KINDS)
    assert len(set(colours.values())) == len(KINDS)
    assert len(set(PALETTE)) == 8


@pytest.mark.parametrize(
    ("low", "high", "named"),
    [(15, 300, {1, 2, 5}), (0.4, 2.2, {1, 2, 5}), (530, 1280, set(range(1, 10)))],
)
def test_a_logarithmic_axis_has_two_names_at_least(
    low: float, high: float, named: set[int]
) -> None:
    assert set(log_steps(low, high)) == named


Point = tuple[str, float, float, str]


def labelled(points: list[Point], drawn: list[tuple[float, float]] | None = None) -> Axes:
    """Axes of 4 by 2 inches from 0 to 100."""
    figure = Figure(figsize=(4, 2))
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    axis.set_xlim(0, 100)
    axis.set_ylim(0, 100)
    label_points(axis, points, drawn or [])
    figure.draw_without_rendering()
    return axis


def boxes(axis: Axes) -> dict[str, Bbox]:
    """Where names are, without the lines that lead to them."""
    return {one.get_text(): Text.get_window_extent(one) for one in axis.texts}


def pixel(axis: Axes, x: float, y: float) -> tuple[float, float]:
    across, up = axis.transData.transform((x, y))
    return float(across), float(up)


@pytest.mark.parametrize("x", [1.0, 99.0])
@pytest.mark.parametrize("y", [1.0, 99.0])
def test_a_name_is_within_the_axes(x: float, y: float) -> None:
    axis = labelled([("cacheblend r=0.5", x, y, "black")])
    box, frame = boxes(axis)["cacheblend r=0.5"], axis.get_window_extent()
    assert frame.x0 <= box.x0
    assert box.x1 <= frame.x1
    assert frame.y0 <= box.y0
    assert box.y1 <= frame.y1


def test_names_neither_overlap_nor_cover_points() -> None:
    points = [(f"k={n}", 45 + 4.0 * n, 50.0, "black") for n in range(4)]
    axis = labelled(points)
    found = list(boxes(axis).values())
    for number, box in enumerate(found):
        assert not any(box.overlaps(other) for other in found[number + 1 :])
        assert not any(box.contains(*pixel(axis, x, y)) for _, x, y, _ in points)
