"""Heat maps of a score over two quantities, a panel an arm, with one scale for all."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from picbench.output.figures.paper_canvas import LABEL, Panel, canvas

#: Panels of a line.
_ACROSS = 2


def draw_heat_maps(
    panel: Panel,
    maps: Mapping[str, Sequence[Sequence[float]]],
    ticks: tuple[Sequence[str], Sequence[str]],
    base: Path,
) -> None:
    """Draw scores from 0 to 1, ``maps[name][row][column]``; the first row is at the top.

    `ticks` name the columns and the rows. Cells that are not a number stay white.
    """
    lines = -(-(len(maps) + 1) // _ACROSS)
    with canvas(panel, base, plot=0.92 * lines, above=0.1) as figure:
        spaces = {"hspace": 0.55, "wspace": 0.12}
        grid = figure.subplots(lines, _ACROSS, squeeze=False, gridspec_kw=spaces)
        axes = list(grid.flat)
        columns, rows = ticks
        for number, (axis, (name, cells)) in enumerate(zip(axes, maps.items(), strict=False)):
            image = axis.imshow(cells, cmap="cividis", vmin=0, vmax=1, aspect="auto")
            axis.grid(visible=False)
            axis.spines[:].set_visible(False)
            axis.set_title(name, fontsize=LABEL, loc="left", pad=2)
            axis.tick_params(pad=1.5, length=1.5, labelsize=LABEL)
            below = number + _ACROSS >= len(maps)
            axis.set_xticks(range(0, len(columns), 2), columns[::2] if below else [])
            axis.set_yticks(range(len(rows)), [] if number % _ACROSS else rows)
            if below:
                axis.set_xlabel(panel.x_label, fontsize=LABEL, labelpad=1)
            if not number % _ACROSS:
                axis.set_ylabel(panel.y_label, fontsize=LABEL, labelpad=2)
        for axis in axes[len(maps) :]:
            axis.set_visible(False)
        free = axes[len(maps)].get_position()
        bar = figure.add_axes(
            (free.x0 + 0.1 * free.width, free.y0 + 0.45 * free.height, 0.8 * free.width, 0.02)
        )
        scale = figure.colorbar(image, cax=bar, orientation="horizontal")
        scale.set_label("mean score", fontsize=LABEL, labelpad=1)
        scale.ax.tick_params(labelsize=LABEL, length=1.5, pad=1.5)
        scale.outline.set_visible(False)
