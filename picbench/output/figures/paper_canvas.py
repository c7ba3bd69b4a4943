"""A panel as papers print it: 85 mm wide, with a note of what was measured below it."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import log10
from pathlib import Path
from typing import TYPE_CHECKING, Any

from picbench.output.figures.style import drawing, log_steps, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Inches: a column of a paper, and what lies between the plot and the frame.
COLUMN = 85 / 25.4
_LEFT, _TOP = 0.51, 0.1

#: Points: letters of axes, of labels in the plot, and of the note. Less than 6 cannot be read.
AXIS, LABEL, NOTE = 7.0, 6.2, 6.0

#: Inches: a digit of a tick's label.
_LETTER = 0.64 * LABEL / 72

#: Letters of a line of the note, and inches from one line of it to the next.
_LETTERS, _LINE = 69, 0.098

FORMATS = ("png", "pdf", "svg")

_SETTINGS: dict[Any, Any] = {
    "font.size": AXIS,
    "axes.linewidth": 0.6,
    "axes.spines.right": False,
    "axes.labelsize": AXIS,
    "xtick.labelsize": LABEL,
    "ytick.labelsize": LABEL,
    "lines.linewidth": 1.1,
    "lines.markersize": 3.6,
    "grid.linewidth": 0.4,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "pdf.fonttype": 42,
}


@dataclass(frozen=True, slots=True)
class Panel:
    """What a panel says: its axes, whether they are logarithmic, and the note."""

    x_label: str
    y_label: str
    note: str
    log_x: bool = False
    log_y: bool = False


@contextmanager
def canvas(
    panel: Panel,
    base: Path,
    *,
    plot: float = 1.55,
    right: float = 0.12,
    above: float = 0.0,
    ticks: int = 1,
) -> Iterator["Figure"]:
    """A figure whose area for axes is `plot` inches high; written when the block ends.

    `right` and `above` are inches beside and above it, for labels; `ticks` is how many lines the
    labels of ticks below it have. Writes ``base.png``, ``base.pdf`` and ``base.svg``.
    """
    with drawing():
        import matplotlib
        from matplotlib.figure import Figure

        with matplotlib.rc_context(_SETTINGS):
            lines = textwrap.wrap(panel.note, _LETTERS)
            below = 0.36 + _LINE * len(lines) + 0.105 * (ticks - 1)
            height = plot + below + _TOP + above
            figure = Figure(figsize=(COLUMN, height))
            figure.subplots_adjust(
                left=_LEFT / COLUMN,
                right=1 - right / COLUMN,
                bottom=below / height,
                top=(plot + below) / height,
            )
            figure.text(
                0.012,
                0.02 / height,
                "\n".join(lines),
                fontsize=NOTE,
                va="bottom",
                color="#444444",
            )
            yield figure
            _write(figure, base, panel.note)


def _write(figure: "Figure", base: Path, note: str) -> None:
    base.parent.mkdir(parents=True, exist_ok=True)
    metadata: dict[str, dict[str, Any]] = {
        "png": {"Description": note},
        "pdf": {"Subject": note, "CreationDate": None},
        "svg": {"Description": note, "Date": None},
    }
    for kind in FORMATS:
        save(figure, base, kind, dpi=300, metadata=metadata[kind])


def scale(axis: "Axes", panel: Panel) -> None:
    """Names, and logarithmic scales with plain numbers."""
    axis.set_xlabel(panel.x_label, labelpad=2)
    axis.set_ylabel(panel.y_label, labelpad=2)
    axis.tick_params(pad=2, length=2)
    # Limits are asked for once the scale is set: margins of a linear one may begin below 0.
    box = axis.get_window_extent()
    inch = axis.figure.dpi
    if panel.log_x:
        axis.set_xscale("log")
        low, high = axis.get_xlim()
        _log(axis.xaxis, low, high, box.width / inch, _LETTER * (len(f"{high:,.0f}") + 1))
    if panel.log_y:
        axis.set_yscale("log")
        _log(axis.yaxis, *axis.get_ylim(), box.height / inch, 1.3 * LABEL / 72)


def _log(one: Any, low: float, high: float, inches: float, label: float) -> None:
    """Ticks at 1, 2 and 5, or only at 1 where labels of so many inches would touch."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    apart = inches * log10(2) / log10(high / low)
    one.set_major_locator(LogLocator(subs=log_steps(low, high) if apart > label else (1.0,)))
    one.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    one.set_minor_formatter(NullFormatter())


def name_column(figure: "Figure", axes: Sequence["Axes"], name: str) -> None:
    """One name for the y axes of panels that are below each other; the first is at the top."""
    middle = (axes[0].get_position().y1 + axes[-1].get_position().y0) / 2
    figure.supylabel(name, fontsize=AXIS, x=0.012, y=middle, ha="left")


def beside(names: Iterable[str]) -> float:
    """Inches that `label_ends` needs to the right of the axes for these names."""
    return 0.11 + 0.0535 * max(
        (len(line) for name in names for line in name.split("\n")), default=0
    )


def label_ends(
    axis: "Axes", ends: Sequence[tuple[str, float, float, str]], letters: float = LABEL
) -> None:
    """Names to the right of the axes, next to where lines end: (name, x, y, colour) each.

    Names that would overlap are moved apart, and a thin line leads to each. Needs final limits.
    All have the space of the one with most lines.
    """
    figure = axis.figure
    box = axis.get_window_extent()
    per_point = figure.dpi / 72
    lines = max((name.count("\n") + 1 for name, *_ in ends), default=1)
    gap = letters * 1.15 * per_point * lines
    at = [axis.transData.transform((x, y)) for _, x, y, _ in ends]
    heights = spread([float(y) for _, y in at], gap, box.y0, box.y1)
    for (name, _, _, colour), (x, y), height in zip(ends, at, heights, strict=True):
        start = ((x - box.x0) / box.width, (y - box.y0) / box.height)
        end = (1.03, (height - box.y0) / box.height)
        axis.plot(
            [start[0], end[0]],
            [start[1], end[1]],
            transform=axis.transAxes,
            color=colour,
            lw=0.4,
            clip_on=False,
            zorder=1,
        )
        axis.text(
            1.04,
            end[1],
            name,
            transform=axis.transAxes,
            fontsize=letters,
            color=colour,
            va="center",
            linespacing=1.0,
            path_effects=outline(),
        )


def outline() -> list[Any]:
    """White around letters, which keeps them readable on lines and bars."""
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=1.4, foreground="white")]


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places as near as possible to the wanted ones, at least `gap` apart and between the ends."""
    order = sorted(range(len(wanted)), key=lambda n: wanted[n])
    placed: list[float] = []
    for number in order:
        least = placed[-1] + gap if placed else low
        placed.append(max(wanted[number], least))
    for index in range(len(placed) - 1, -1, -1):
        most = high if index == len(placed) - 1 else placed[index + 1] - gap
        placed[index] = min(placed[index], most)
    found = [0.0] * len(wanted)
    for number, place in zip(order, placed, strict=True):
        found[number] = place
    return found
