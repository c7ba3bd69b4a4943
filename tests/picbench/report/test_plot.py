"""Axes and marks of small plots."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.report.charts import HEIGHT, WIDTH, Axis, Plot, arm_class, dashes
from picbench.report.sections import element

VALUES = st.floats(1e-3, 1e6)


@given(st.lists(VALUES, min_size=1, max_size=5), st.booleans())
def test_an_axis_has_its_values_and_a_few_round_ticks(values: list[float], log: bool) -> None:
    axis = Axis.around("ms", values, log=log)
    assert all(0 <= axis.share(value) <= 1 for value in values)
    assert 2 <= len(axis.ticks) <= 6
    assert all(-1e-9 <= axis.share(tick) <= 1 + 1e-9 for tick in axis.ticks)


@pytest.mark.parametrize(
    ("axis", "ticks"),
    [
        (Axis("x", 0, 1), [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (Axis("x", 900, 12000, log=True), [1000, 2000, 5000, 10000]),
        (Axis("x", 1, 1e6, log=True), [1, 1e2, 1e4, 1e6]),
        (Axis("x", 101, 103, log=True), [101, 101.5, 102, 102.5, 103]),
    ],
)
def test_ticks_are_round(axis: Axis, ticks: list[float]) -> None:
    assert axis.ticks == pytest.approx(ticks)


def test_marks_are_inside_of_the_view_box() -> None:
    plot = Plot(Axis("x", 1, 100, log=True), Axis("y", -1, 1), "a plot")
    for x, y in ((1, -1), (100, 1), (10, 0)):
        left, top = plot.at(x, y)
        assert 0 < left < WIDTH
        assert 0 < top < HEIGHT
    assert math.isclose(plot.at(10, 0)[0], (plot.at(1, 0)[0] + plot.at(100, 0)[0]) / 2)


def test_lines_of_many_arms_differ() -> None:
    assert len({(arm_class(place), dashes(place)) for place in range(32)}) == 32


def test_text_and_attributes_are_escaped() -> None:
    found = element("text", "<b>&", element("i", "in"), class_='a"b', x=1.5, fill=None)
    assert found == '<text class="a&#34;b" x="1.5">&lt;b&gt;&amp;<i>in</i></text>'
