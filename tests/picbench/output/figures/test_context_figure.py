"""The figure of TTFT against the length of the context."""

from pathlib import Path

import pytest
from matplotlib.axes import Axes
from printed_figure import check_printed

from picbench.output.figures.context_figure import draw_context

CAPTION = "A model, dummy weights; a GPU. Cached but for `full`. n=3."

LINES = {
    "full": {50_256: [900.0, 700.0, 800.0], 1104: [10.0, 30.0, 25.0]},
    "epic:k=16:copy=shared": {1104: [6.0, 7.0, 6.5], 50_256: [40.0, 41.0, 42.0]},
    "mepic": {1104: [5.0, 6.0, 5.5]},
}


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is written beside lines, which is outlined and so no text in an SVG."""
    found: list[str] = []
    real = Axes.text

    def text(self: Axes, x: float, y: float, name: str, **style: object) -> object:
        found.append(name)
        return real(self, x, y, name, **style)  # type: ignore[arg-type]

    monkeypatch.setattr(Axes, "text", text)
    return found


def test_arms_that_others_press_to_the_axis_have_a_panel_of_their_own(
    tmp_path: Path, names: list[str]
) -> None:
    draw_context(LINES, CAPTION, tmp_path / "new" / "context")
    text = check_printed(tmp_path / "new" / "context")
    assert names == ["full", "the others, below", "epic", "mepic"]
    assert text.count(">context, thousand tokens<") == 1
    assert "Cached but for full. n=3. Arms: epic:k=16:copy=shared." in text


def test_arms_of_a_height_have_one_panel(tmp_path: Path, names: list[str]) -> None:
    arms = {f"epic:k={k}": {1104: [1.0 + k], 8272: [20.0 + k]} for k in (8, 16)}
    draw_context(arms, CAPTION, tmp_path / "context")
    assert names == list(arms)
    assert "Arms:" not in check_printed(tmp_path / "context")


def test_points_are_medians_between_the_lowest_and_the_highest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[object, ...]] = []
    real = Axes.errorbar

    def errorbar(self: Axes, x: object, y: object, **style: object) -> object:
        drawn.append((x, y, style["yerr"]))
        return real(self, x, y, **style)  # type: ignore[arg-type]

    monkeypatch.setattr(Axes, "errorbar", errorbar)
    draw_context(LINES, CAPTION, tmp_path / "context")
    assert drawn[3:] == drawn[1:3]
    assert drawn[0] == ([1.104, 50.256], [25.0, 800.0], [[15.0, 100.0], [5.0, 100.0]])
    assert drawn[2] == ([1.104], [5.5], [[0.5], [0.5]])


def test_the_same_numbers_give_the_same_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        draw_context(LINES, CAPTION, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
