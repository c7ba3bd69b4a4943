"""The figure of TTFT against the length of the context."""

from pathlib import Path

import pytest
from matplotlib.axes import Axes

from picbench.output.figures.curves import draw_context

CAPTION = "A model, dummy weights; a GPU. n=3."

LINES = {
    "full": {50_256: [900.0, 700.0, 800.0], 1104: [10.0, 30.0, 25.0]},
    "mepic": {1104: [5.0, 6.0, 5.5]},
}


def test_a_line_for_each_arm_on_both_scales(tmp_path: Path) -> None:
    draw_context(LINES, CAPTION, tmp_path / "new" / "context")
    text = (tmp_path / "new" / "context.svg").read_text()
    for words in ("full", "mepic", "thousand tokens", "time to the first token, ms", CAPTION):
        assert words in text
    assert text.count("context, thousand tokens") == 2
    assert (tmp_path / "new" / "context.png").read_bytes().startswith(b"\x89PNG")


def test_points_are_medians_between_the_lowest_and_the_highest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[object, ...]] = []
    scales: list[object] = []
    real = Axes.errorbar

    def errorbar(self: Axes, x: object, y: object, **style: object) -> object:
        drawn.append((style["label"], x, y, style["yerr"]))
        return real(self, x, y, **style)  # type: ignore[arg-type]

    monkeypatch.setattr(Axes, "errorbar", errorbar)
    monkeypatch.setattr(Axes, "set_yscale", lambda _, scale: scales.append(scale))
    draw_context(LINES, CAPTION, tmp_path / "context")
    assert scales == ["linear", "log"]
    assert drawn[2:] == drawn[:2]
    assert drawn[:2] == [
        ("full", [1.104, 50.256], [25.0, 800.0], [[15.0, 100.0], [5.0, 100.0]]),
        ("mepic", [1.104], [5.5], [[0.5], [0.5]]),
    ]


def test_the_same_numbers_give_the_same_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        draw_context(LINES, CAPTION, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
