"""Names beside points: whose they are is clear, and they cover nothing."""

import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from picbench.figures.canvas import label_points

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


def test_a_name_with_room_is_to_the_right_of_its_point() -> None:
    axis = labelled([("k=64", 50, 50, "black")])
    x, y = pixel(axis, 50, 50)
    box = boxes(axis)["k=64"]
    assert x < box.x0 < x + 15
    assert box.y0 < y < box.y1


def test_a_name_stays_away_from_points_without_a_name() -> None:
    """To the right it could be taken for the other point's."""
    axis = labelled([("k=2", 50, 50, "black"), ("", 58, 50, "")])
    assert boxes(axis)["k=2"].x1 < pixel(axis, 50, 50)[0]


@pytest.mark.parametrize("x", [1.0, 99.0])
@pytest.mark.parametrize("y", [1.0, 99.0])
def test_a_name_is_within_the_axes(x: float, y: float) -> None:
    axis = labelled([("cacheblend r=0.5", x, y, "black")])
    box, frame = boxes(axis)["cacheblend r=0.5"], axis.get_window_extent()
    assert frame.x0 < box.x0
    assert box.x1 < frame.x1
    assert frame.y0 < box.y0
    assert box.y1 < frame.y1


def test_names_neither_overlap_nor_cover_points() -> None:
    points = [(f"k={n}", 45 + 4.0 * n, 50.0, "black") for n in range(4)]
    axis = labelled(points)
    found = list(boxes(axis).values())
    for number, box in enumerate(found):
        assert not any(box.overlaps(other) for other in found[number + 1 :])
        assert not any(box.contains(*pixel(axis, x, y)) for _, x, y, _ in points)


def test_a_name_is_put_above_its_own_bar_where_others_are_close() -> None:
    """Bars of neighbours fill both sides; a line along its own bar hides none of them."""
    spots = [(x, 50.0) for x in (44.0, 47.0, 53.0, 56.0)]
    drawn = [(x, float(y)) for x, _ in [*spots, (50.0, 50.0)] for y in range(35, 66, 2)]
    axis = labelled([("k=2", 50, 50, "black"), *(("", x, y, "") for x, y in spots)], drawn)
    box = boxes(axis)["k=2"]
    assert box.x0 < pixel(axis, 50, 50)[0] < box.x1
    assert box.y0 > pixel(axis, 50, 65)[1] or box.y1 < pixel(axis, 50, 35)[1]
