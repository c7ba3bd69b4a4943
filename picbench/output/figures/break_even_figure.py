"""Ratios over reuse and the size of prompts, with a line around the cells below 1."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from picbench.output.figures.paper_canvas import COLUMN, LABEL, Panel, canvas, name_column

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Ratios beyond this and its inverse have the colour of the end of the scale.
_MOST = 3.0

#: Inches: a row of cells, the title of a panel, and what is left of the cells.
_ROW, _TITLE, _LEFT = 0.17, 0.16, 0.62


@dataclass(frozen=True, slots=True)
class RatioPanel:
    """A panel: ratios by reuse and by (chunks, tokens of a chunk)."""

    title: str
    values: Mapping[tuple[float, tuple[int, int]], float]


def draw_ratios(panels: Sequence[RatioPanel], note: str, base: Path) -> None:
    """A cell for each ratio, panels below each other: blue below 1, orange above.

    Writes ``base.png``, ``base.pdf`` and ``base.svg``, as papers print them.
    """
    reuses = sorted({reuse for panel in panels for reuse, _ in panel.values})
    sizes = sorted({size for panel in panels for _, size in panel.values}, key=_tokens)
    if any(len(panel.values) < len(reuses) * len(sizes) for panel in panels):
        note += " Grey: not measured."
    high = _ROW * len(sizes)
    plot = high * len(panels) + _TITLE * (len(panels) - 1)
    about = Panel("chunk tokens that recur", "chunks x tokens", note)
    with canvas(about, base, plot=plot, above=_TITLE - 0.1) as figure:
        figure.subplots_adjust(left=_LEFT / COLUMN)
        spaces = {"hspace": _TITLE / high}
        grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False, gridspec_kw=spaces)
        axes: list[Axes] = list(grid[:, 0])
        for axis, panel in zip(axes, panels, strict=True):
            _draw(axis, panel, reuses, sizes)
        axes[-1].set_xticks([n + 0.5 for n in range(len(reuses))], [f"{r:.0%}" for r in reuses])
        axes[-1].set_xlabel(about.x_label, labelpad=2)
        name_column(figure, axes, about.y_label)


def _draw(
    axis: "Axes", panel: RatioPanel, reuses: Sequence[float], sizes: Sequence[tuple[int, int]]
) -> None:
    from matplotlib.colors import LinearSegmentedColormap, LogNorm
    from matplotlib.patches import Rectangle

    # Okabe and Ito's sky blue and orange: light enough for black letters.
    colours = LinearSegmentedColormap.from_list("ratio", ("#56B4E9", "#FFFFFF", "#E69F00"))
    norm = LogNorm(1 / _MOST, _MOST, clip=True)
    ratios = {
        (row, column): panel.values[reuse, size]
        for row, size in enumerate(sizes)
        for column, reuse in enumerate(reuses)
        if (reuse, size) in panel.values
    }
    for (row, column), ratio in ratios.items():
        colour = colours(norm(ratio))
        cell = Rectangle((column, row), 1, 1, facecolor=colour, edgecolor="#BBBBBB", linewidth=0.3)
        axis.add_patch(cell)
        place: dict[str, Any] = {"ha": "center", "va": "center_baseline", "fontsize": LABEL}
        axis.text(column + 0.5, row + 0.5, _text(ratio), **place)
    for line in _borders(ratios):
        axis.plot(*line, color="black", lw=1.2, solid_capstyle="projecting")
    axis.set_facecolor("#DDDDDD")
    axis.set_title(panel.title, fontsize=LABEL, loc="left", pad=2)
    axis.set_yticks([n + 0.5 for n in range(len(sizes))], [f"{c} x {t}" for c, t in sizes])
    axis.set_xlim(0, len(reuses))
    axis.set_ylim(len(sizes), 0)
    axis.tick_params(pad=3, length=0)
    axis.grid(visible=False)
    axis.spines[:].set_visible(True)


def _borders(
    ratios: Mapping[tuple[int, int], float],
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """(xs, ys) of each edge between a cell below 1 and one that is not; cells by (row, column)."""
    for (row, column), ratio in ratios.items():
        right, below = ratios.get((row, column + 1)), ratios.get((row + 1, column))
        if right is not None and (ratio < 1) != (right < 1):
            yield (column + 1, column + 1), (row, row + 1)
        if below is not None and (ratio < 1) != (below < 1):
            yield (column, column + 1), (row + 1, row + 1)


def _text(ratio: float) -> str:
    """Two places, or three where two would not say on which side of 1 it is."""
    text = f"{ratio:.2f}"
    return f"{ratio:.3f}" if text == "1.00" and ratio != 1 else text


def _tokens(size: tuple[int, int]) -> tuple[int, int]:
    return size[0] * size[1], size[0]
