"""The figure of accuracy against linked tokens: panels, families, the frontier and the goal."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from printed_figure import check_printed

from picbench.experiments.arm_scores import ARMS_OF, arms_of
from picbench.figures.frontier import FrontierPoint, draw_frontier, frontier_steps

CAPTION = "A model; a GPU; n=200."
GOAL = ("mepic", 0.97)


def point(arm: str, share: float, kept: float) -> FrontierPoint:
    return FrontierPoint(arm, share, kept, kept - 0.02, kept + 0.01)


PANELS = {
    "musique": [
        point("full", 1.0, 1.0),
        point("naive", 0.0, 0.6),
        point("epic:k=16", 0.2, 0.7),
        point("epic:k=64", 0.7, 0.9),
        point("mepic", 0.2, 0.65),
        point("mepic:anchored=on:context=document", 0.2, 0.99),
        point("testbed:link/kvlink:n=5", 0.05, 0.96),
    ],
    "needle": [point("full", 1.0, 1.0), point("naive", 0.0, 0.6), point("mepic", 0.1, 0.61)],
}


def test_everything_is_named_in_the_legend(tmp_path: Path) -> None:
    draw_frontier(PANELS, GOAL, CAPTION, tmp_path / "new" / "all")
    text = check_printed(tmp_path / "new" / "all")
    for words in ("musique", "needle", "naive", "ours: anchor and document", "tuned models"):
        assert text.count(f">{words}<") == 1, words
    assert "cacheblend" not in text
    assert "The goal: 0.97 of full's score, linking no more than mepic. A model" in text


def test_points_have_their_intervals_and_families_one_line_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, tuple[list[float], list[float]]] = {}
    real = Axes.errorbar

    def errorbar(self: Axes, x: list[float], y: list[float], **style: object) -> object:
        if self.get_subplotspec().is_first_col():  # type: ignore[union-attr]
            drawn[str(style["label"])] = (x, y)
        return real(self, x, y, **style)  # type: ignore[arg-type]

    monkeypatch.setattr(Axes, "errorbar", errorbar)
    draw_frontier({"musique": PANELS["musique"]}, GOAL, CAPTION, tmp_path / "all")
    assert drawn["epic, k = 1 to 64"] == (pytest.approx([20, 70]), pytest.approx([70, 90]))
    assert drawn["ours: anchor and document"] == (pytest.approx([20]), pytest.approx([99]))
    assert drawn["tuned models"] == (pytest.approx([5]), pytest.approx([96]))
    assert len(drawn) == 5


def test_every_arm_that_is_measured_can_be_drawn(tmp_path: Path) -> None:
    points = [point(arm, 0.1, 0.9) for arm in arms_of("testbed")]
    points += [point(f"{model}/{arm}", 0.1, 0.9) for model in ARMS_OF for arm in arms_of(model)]
    draw_frontier({"musique": points}, GOAL, CAPTION, tmp_path / "all")
    check_printed(tmp_path / "all")


def test_the_frontier_is_of_arms_that_nothing_cheaper_beats() -> None:
    assert frontier_steps(PANELS["musique"]) == [
        (0.0, 0.6),
        (0.05, 0.96),
        (0.2, 0.99),
        (1.0, 1.0),
        (1.0, 1.0),
    ]
    assert frontier_steps([]) == []


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1))
def test_no_arm_is_above_the_frontier(pairs: list[tuple[float, float]]) -> None:
    steps = frontier_steps([point("naive", share, kept) for share, kept in pairs])
    assert steps == sorted(steps)
    for share, kept in pairs:
        assert kept <= max(k for s, k in steps if s <= share)


def test_the_same_numbers_give_the_same_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        draw_frontier(PANELS, GOAL, CAPTION, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
