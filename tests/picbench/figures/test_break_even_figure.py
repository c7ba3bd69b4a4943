"""Figures of break-even: as wide as a column, letters that can be read, nothing that is cut."""

from itertools import product
from pathlib import Path

import pytest
from printed_figure import check_printed

from picbench.experiments.grid_plan import GRIDS, GridSettings
from picbench.figures.frontier import RatioPanel, _borders, _text, draw_ratios

NOTE = (
    "mepic's TTFT over another arm's. NVIDIA H200, CUDA 12.9, TORCH 2.13.0+cu129, 9876543-dirty. "
)


def panels(settings: GridSettings, *, missing: bool = False) -> list[RatioPanel]:
    """Ratios from 0.06 to 16, the ends of what has a colour of its own and beyond."""
    cells = list(product(settings.reuse, product(settings.chunks, settings.chunk_tokens)))
    values = {cell: 2 ** (8 * n / len(cells) - 4) for n, cell in enumerate(cells[missing:])}
    return [RatioPanel(f"against {rival}", values) for rival in ("prefix", "reorder")]


@pytest.mark.parametrize("device", GRIDS)
def test_every_grid_fits_a_column(device: str, tmp_path: Path) -> None:
    base = tmp_path / "ratios"
    draw_ratios(panels(GRIDS[device]), NOTE * 4, base)
    check_printed(base)


def test_what_was_not_measured_is_named(tmp_path: Path) -> None:
    for missing in (False, True):
        draw_ratios(panels(GRIDS["cpu"], missing=missing), "A note.", tmp_path / "ratios")
        text = check_printed(tmp_path / "ratios")
        assert ("Grey: not measured." in text) == missing


def test_the_line_is_where_cells_below_1_end() -> None:
    ratios = {(0, 0): 1.2, (0, 1): 0.9, (1, 0): 1.0, (1, 1): 0.8}
    assert set(_borders(ratios)) == {((1, 1), (0, 1)), ((1, 1), (1, 2))}
    assert set(_borders({(0, 0): 0.5, (1, 0): 1.5})) == {((0, 1), (1, 1))}


@pytest.mark.parametrize(
    ("ratio", "text"), [(0.997, "0.997"), (1.0, "1.00"), (1.004, "1.004"), (0.944, "0.94")]
)
def test_numbers_say_on_which_side_of_1_they_are(ratio: float, text: str) -> None:
    assert _text(ratio) == text
