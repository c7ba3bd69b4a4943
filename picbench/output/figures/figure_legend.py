"""A legend above panels, in as many columns as a paper's column has room for."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from picbench.output.figures.paper_canvas import COLUMN, LABEL

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Inches: a line of the legend, a letter of it on average, and what a column has besides letters.
_LINE, _LETTER, _BESIDE = 0.12, 0.62 * LABEL / 72, 0.27


def legend_height(names: Sequence[str]) -> float:
    """Inches that the legend needs above the panels, with what lies between."""
    return _LINE * -(-len(names) // _columns(names)) + 0.05


def draw_legend(figure: "Figure", handles: Sequence[Any], names: Sequence[str]) -> None:
    """Put it at the top of the figure, in the middle."""
    figure.legend(
        handles,
        names,
        loc="upper center",
        ncols=_columns(names),
        fontsize=LABEL,
        handletextpad=0.4,
        columnspacing=1.0,
        labelspacing=0.25,
        borderpad=0.1,
        handlelength=1.2,
        bbox_to_anchor=(0.5, 1 - 0.02 / figure.get_figheight()),
    )


def _columns(names: Sequence[str]) -> int:
    """The most columns, of four at most, that are no wider than the figure."""
    return next(
        (count for count in range(min(4, len(names)), 1, -1) if _width(names, count) <= COLUMN), 1
    )


def _width(names: Sequence[str], columns: int) -> float:
    """Inches of a legend that is filled column by column, the first ones having one name more."""
    least, more = divmod(len(names), columns)
    width, start = 0.0, 0
    for column in range(columns):
        end = start + least + (column < more)
        width += _LETTER * max(map(len, names[start:end])) + _BESIDE
        start = end
    return width
