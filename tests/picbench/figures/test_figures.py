"""Figures say what they show, and are the same for the same numbers."""

from pathlib import Path

import numpy as np
import pytest
from full_disk import largest_file
from matplotlib.figure import Figure
from printed_figure import check_printed

from picbench.engines.ledger import KINDS
from picbench.figures.canvas import Panel, canvas
from picbench.figures.run import draw_occupancy
from picbench.figures.style import PALETTE, arm_styles, drawing, kind_colours, log_steps, write
from picbench.store.reader import Series

CAPTION = "cpu: a machine. testbed model, synthetic rows. 3 requests an arm, seeds 1."


def series(scale: float) -> Series:
    held = np.array([0.0, 10.0, 25.0, 5.0]) * scale
    blocks = {kind: np.zeros(4) for kind in KINDS} | {"prompt": held, "free": 100 - held}
    return Series(np.array([0.0, 0.5, 1.0, 2.0]), blocks, 100)


def test_figures_that_do_not_fit_are_not_there(tmp_path: Path) -> None:
    """They were torn, or empty files of their names."""
    panel = Panel("x", "y", "note")
    with drawing(), largest_file(500), pytest.raises(OSError, match="too large") as caught:
        write(Figure(), CAPTION, tmp_path / "a")
    assert caught.value.filename == str(tmp_path / "a.svg")
    too_large = pytest.raises(OSError, match="too large")
    with largest_file(500), too_large as caught, canvas(panel, tmp_path / "b"):
        pass
    assert caught.value.filename == str(tmp_path / "b.png")
    assert list(tmp_path.iterdir()) == []


PANELS = {name: {"mepic": series(0.5), "full": series(1.0)} for name in ("squad", "emrqa", "odd")}


def test_occupancy_has_a_panel_for_each_workload_and_arm(tmp_path: Path) -> None:
    draw_occupancy(PANELS, CAPTION, tmp_path / "new" / "load")
    text = check_printed(tmp_path / "new" / "load")
    for words in ("squad: mepic", "squad: full", "emrqa: full", "odd: mepic"):
        assert f">{words}<" in text
    assert "KV referenced, % of pool" in text
    assert CAPTION in text


def test_an_arm_without_a_workload_leaves_its_panel_empty(tmp_path: Path) -> None:
    draw_occupancy({"squad": {"mepic": series(1.0)}, "emrqa": {}}, CAPTION, tmp_path / "load")
    assert "emrqa: mepic" in check_printed(tmp_path / "load")


def test_the_same_numbers_give_the_same_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        draw_occupancy(PANELS, CAPTION, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_captions_have_names_of_folders_as_they_are(tmp_path: Path) -> None:
    """Dollars began a formula, and what the font lacks ended in a warning."""
    caption = "runs of $\\q{HOME}$ in 運"
    with drawing():
        write(Figure(), caption, tmp_path / "load")
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
