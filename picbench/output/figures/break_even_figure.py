"""Ratios over reuse and the size of prompts, with the line at which two arms are equal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from picbench.output.figures.style import WIDTH, drawing, write

#: Ratios beyond this and its inverse have the colour of the end of the scale.
_MOST = 4.0


@dataclass(frozen=True, slots=True)
class RatioPanel:
    """A panel: ratios by reuse and by (chunks, tokens of a chunk)."""

    title: str
    values: Mapping[tuple[float, tuple[int, int]], float]


def draw_ratios(panels: Sequence[RatioPanel], caption: str, base: Path) -> None:
    """A field for each cell with its ratio: blue below 1, orange above; a line where it is 1."""
    with drawing():
        from matplotlib.colors import LinearSegmentedColormap, LogNorm
        from matplotlib.figure import Figure

        # The ends are Okabe and Ito's blue and vermilion.
        colours = LinearSegmentedColormap.from_list("ratio", ("#0072B2", "#FFFFFF", "#D55E00"))
        sizes = sorted({size for panel in panels for _, size in panel.values}, key=_tokens)
        figure = Figure(figsize=(WIDTH, 1.5 + 0.42 * len(sizes)), layout="constrained")
        norm = LogNorm(1 / _MOST, _MOST)
        for axis, panel in zip(figure.subplots(1, len(panels), sharey=True), panels, strict=True):
            _draw(axis, panel, sizes, norm, colours)
        write(figure, caption, base)


def _draw(
    axis: Any, panel: RatioPanel, sizes: Sequence[tuple[int, int]], norm: Any, colours: Any
) -> None:
    import numpy as np

    reuses = sorted({reuse for reuse, _ in panel.values})
    rows = [[panel.values.get((reuse, size), np.nan) for reuse in reuses] for size in sizes]
    field = np.array(rows)
    axis.imshow(np.clip(field, *(norm.vmin, norm.vmax)), norm=norm, cmap=colours, aspect="auto")
    for row, column in np.argwhere(~np.isnan(field)):
        ratio = field[row, column]
        box = {"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1}
        place = {"ha": "center", "va": "center", "fontsize": 8, "zorder": 5, "bbox": box}
        axis.text(column, row, f"{ratio:.2f}", **place)
    if min(field.shape) > 1 and np.nanmin(field) < 1 < np.nanmax(field):
        axis.contour(field, levels=[1.0], colors="black", linewidths=1.5)
    axis.set_title(panel.title, fontsize=9)
    axis.set_xticks(range(len(reuses)), [f"{reuse:.0%}" for reuse in reuses])
    axis.set_xlabel("chunk tokens that recur")
    labels = [f"{chunks} x {tokens}" for chunks, tokens in sizes]
    axis.set_yticks(range(len(sizes)), labels)
    axis.set_ylabel("chunks x tokens" if axis.get_subplotspec().is_first_col() else "")
    axis.grid(visible=False)


def _tokens(size: tuple[int, int]) -> tuple[int, int]:
    return size[0] * size[1], size[0]
