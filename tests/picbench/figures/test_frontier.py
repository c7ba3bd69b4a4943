"""Accuracy against linked tokens, and ratios of break-even: what is drawn and named."""

from itertools import product
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from printed_figure import check_printed

from picbench.experiments.grid import GridSettings, read_grids
from picbench.figures.frontier import (
    FrontierPoint,
    RatioPanel,
    draw_frontier,
    draw_ratios,
    frontier_steps,
)
from picbench.papers.arm_scores import ARMS_OF, arms_of

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
        point("mepic:anchor=head:context=document", 0.2, 0.99),
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
    for name in ("all", "same"):
        draw_frontier({"musique": points}, GOAL, CAPTION, tmp_path / name)
    check_printed(tmp_path / "all")
    assert (tmp_path / "all.svg").read_bytes() == (tmp_path / "same.svg").read_bytes()


def test_the_frontier_is_of_arms_that_nothing_cheaper_beats() -> None:
    assert frontier_steps(PANELS["musique"]) == [
        (0.0, 0.6),
        (0.05, 0.96),
        (0.2, 0.99),
        (1.0, 1.0),
        (1.0, 1.0),
    ]
    assert frontier_steps([]) == []


NOTE = (
    "mepic's TTFT over another arm's. NVIDIA H200, CUDA 12.9, TORCH 2.13.0+cu129, 9876543-dirty. "
)


def ratios_of(settings: GridSettings, *, missing: bool = False) -> list[RatioPanel]:
    """Ratios from 0.06 to 16, the ends of what has a colour of its own and beyond."""
    cells = list(product(settings.reuse, product(settings.chunks, settings.chunk_tokens)))
    values = {cell: 2 ** (8 * n / len(cells) - 4) for n, cell in enumerate(cells[missing:])}
    return [RatioPanel(f"against {rival}", values) for rival in ("prefix", "reorder")]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_grid_fits_a_column(device: str, tmp_path: Path) -> None:
    base = tmp_path / "ratios"
    draw_ratios(ratios_of(read_grids()[device]), NOTE * 4, base)
    check_printed(base)


def test_what_was_not_measured_is_named(tmp_path: Path) -> None:
    for missing in (False, True):
        draw_ratios(ratios_of(read_grids()["cpu"], missing=missing), "A note.", tmp_path / "ratios")
        text = check_printed(tmp_path / "ratios")
        assert ("Grey: not measured." in text) == missing
