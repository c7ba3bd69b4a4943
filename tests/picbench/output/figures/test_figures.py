"""Figures say what they show, and are the same for the same numbers."""

from pathlib import Path

import numpy as np
import pytest

from picbench.engines.ledger import KINDS
from picbench.output.figures.curves import Line, draw_sweep
from picbench.output.figures.occupancy import draw_kinds, draw_occupancy
from picbench.output.figures.style import PALETTE, arm_styles, kind_colours
from picbench.output.run_reader import Series

CAPTION = "cpu: a machine. testbed model, synthetic rows. 3 requests an arm, seeds 1."


def series(scale: float) -> Series:
    held = np.array([0.0, 10.0, 25.0, 5.0]) * scale
    blocks = {kind: np.zeros(4) for kind in KINDS} | {"prompt": held, "free": 100 - held}
    return Series(np.array([0.0, 0.5, 1.0, 2.0]), blocks, 100)


PANELS = {name: {"mepic": series(0.5), "full": series(1.0)} for name in ("squad", "emrqa", "odd")}


def test_occupancy_has_a_panel_a_workload_and_a_line_an_arm(tmp_path: Path) -> None:
    draw_occupancy(PANELS, CAPTION, tmp_path / "fig6")
    text = (tmp_path / "fig6.svg").read_text()
    for words in ("squad", "emrqa", "odd", "mepic", "full", "KV referenced, % of pool"):
        assert words in text
    assert "testbed model, synthetic rows" in text
    assert (tmp_path / "fig6.png").read_bytes().startswith(b"\x89PNG")


def test_kinds_are_all_named(tmp_path: Path) -> None:
    draw_kinds(PANELS, CAPTION, tmp_path / "kinds")
    text = (tmp_path / "kinds.svg").read_text()
    assert all(kind in text for kind in KINDS if kind != "free")
    assert "squad: mepic" in text


def test_a_sweep_has_two_axes(tmp_path: Path) -> None:
    lines = {
        "mepic": Line([(9.0, 0.5), (11.0, 0.1)], [(8.0, 0.0), (9.0, 0.0)]),
        "full": Line([(10.0, 0.5), (30.0, 2.0)], [(20.0, 0.0), (60.0, 0.0)]),
    }
    draw_sweep([2, 16], lines, "chunks per request", CAPTION, tmp_path / "fig8")
    text = (tmp_path / "fig8.svg").read_text()
    assert "chunks per request" in text
    assert "total latency" in text
    assert "peak KV referenced" in text


def test_the_same_numbers_give_the_same_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        draw_occupancy(PANELS, CAPTION, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize("count", [1, 5, 8])
def test_arms_and_kinds_have_colours_of_their_own(count: int) -> None:
    styles = arm_styles([f"arm{n}" for n in range(count)])
    assert len(set(styles.values())) == count
    colours = kind_colours()
    assert set(colours) == set(KINDS)
    assert len(set(colours.values())) == len(KINDS)
    assert len(set(PALETTE)) == 8
