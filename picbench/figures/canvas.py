"""A panel as papers print it: 85 mm wide, with a note of what was measured below it."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import hypot, log10
from pathlib import Path
from typing import TYPE_CHECKING, Any

from picbench.figures.style import drawing, log_steps, save

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


#: Inches: a line of the legend, a letter of it on average, and what a column has besides letters.
_FIGURE_LEGEND_LINE, _FIGURE_LEGEND_LETTER, _BESIDE = 0.12, 0.62 * LABEL / 72, 0.27


def legend_height(names: Sequence[str]) -> float:
    """Inches that the legend needs above the panels, with what lies between."""
    return _FIGURE_LEGEND_LINE * -(-len(names) // _columns(names)) + 0.05


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
        width += _FIGURE_LEGEND_LETTER * max(map(len, names[start:end])) + _BESIDE
        start = end
    return width


#: Points: from a named point to its name, the nearest first; a line leads to those further away.
_REACHES = (4.0, 9.0, 15.0, 22.0, 30.0)
_LED = 13.0

#: Ways to go from a point; 0 across puts the middle of the name above or below it.
_WAYS = (
    (1.0, 0.0),
    (1.0, 1.0),
    (1.0, -1.0),
    (0.0, 1.0),
    (0.0, -1.0),
    (-1.0, 1.0),
    (-1.0, -1.0),
    (-1.0, 0.0),
    (1.0, 0.5),
    (1.0, -0.5),
    (-1.0, 0.5),
    (-1.0, -0.5),
)

#: Points: half of a marker, half of what is drawn elsewhere, and what stays free at the frame.
_MARKER, _INK, _FRAME = 2.6, 1.6, 2.0

#: Square points that a name rather covers than that it may be taken for another point's, that its
#: line crosses another marker or other ink, or that it is a point further away.
_UNCLEAR, _CROSSED, _CROSSED_INK, _FURTHER = 60.0, 60.0, 4.0, 0.5

_Box = tuple[float, float, float, float]
_Place = tuple[float, float]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A name's box, and how far to the right of its point and above it begins."""

    dx: float
    dy: float
    box: _Box

    @property
    def led(self) -> bool:
        return hypot(self.dx, self.dy) > _LED


def label_points(
    axis: "Axes",
    points: Iterable[tuple[str, float, float, str]],
    drawn: Iterable[tuple[float, float]] = (),
    letters: float = NOTE,
) -> None:
    """Write names next to points, (name, x, y, colour) each; those without a name are kept free.

    `drawn` are places of other ink. Needs final limits. What would stand outside the axes is not
    placed there.
    """
    named = list(points)
    at = [_points(axis, x, y) for _, x, y, _ in named]
    ink = [_points(axis, x, y) for x, y in drawn]
    taken = [_around(place, _MARKER) for place in at] + [_around(place, _INK) for place in ink]
    (left, bottom), (right, top) = axis.get_window_extent().get_points() * 72 / axis.figure.dpi
    frame = (left + _FRAME, bottom + _FRAME, right - _FRAME, top - _FRAME)
    for number, (name, x, y, colour) in enumerate(named):
        if not name:
            continue
        others = at[:number] + at[number + 1 :]
        size = (0.63 * letters * len(name), 1.1 * letters)
        place = at[number]
        costs = {
            found: _cost(found, taken, frame) + _doubt(found, place, others, ink)
            for found in _candidates(place, size)
        }
        best = min(costs, key=lambda found: costs[found])
        taken.append(best.box)
        axis.annotate(
            name,
            (x, y),
            xytext=(best.dx, best.dy),
            textcoords="offset points",
            fontsize=letters,
            color=colour,
            ha="left" if best.dx > 0 else "right" if best.dx < 0 else "center",
            va="center",
            path_effects=outline(),
            zorder=5,
            arrowprops={
                "arrowstyle": "-",
                "lw": 0.4,
                "color": colour,
                "shrinkA": 0,
                "relpos": _end(best),
            }
            if best.led
            else None,
        )


def _points(axis: "Axes", x: float, y: float) -> _Place:
    """Where a place is, in points from the corner of the figure."""
    across, up = axis.transData.transform((x, y)) * 72 / axis.figure.dpi
    return float(across), float(up)


def _around(place: _Place, reach: float) -> _Box:
    x, y = place
    return x - reach, y - reach, x + reach, y + reach


def _candidates(place: _Place, size: _Place) -> Iterator[_Candidate]:
    width, height = size
    for reach in _REACHES:
        for across, up in _WAYS:
            # Half a name more, where it is above or below: its middle is what is placed.
            dx, dy = across * reach, up * (reach if across else reach + 2.0)
            x, y = place[0] + dx, place[1] + dy
            left = x if dx > 0 else x - width if dx < 0 else x - width / 2
            box = (left, y - height / 2, left + width, y + height / 2)
            yield _Candidate(dx, dy, box)


def _end(found: _Candidate) -> _Place:
    """Where at a name its line ends."""
    if found.dx:
        return (0.0 if found.dx > 0 else 1.0), 0.5
    return 0.5, (0.0 if found.dy > 0 else 1.0)


def _cost(found: _Candidate, taken: Sequence[_Box], frame: _Box) -> float:
    """Covered area, what is further away, and much more for what is outside."""
    box = found.box
    covered = sum(
        max(0.0, min(box[2], other[2]) - max(box[0], other[0]))
        * max(0.0, min(box[3], other[3]) - max(box[1], other[1]))
        for other in taken
    )
    inside = frame[0] <= box[0] and box[2] <= frame[2] and frame[1] <= box[1] and box[3] <= frame[3]
    return covered + _FURTHER * hypot(found.dx, found.dy) + (0 if inside else 1e6)


def _doubt(
    found: _Candidate, place: _Place, others: Sequence[_Place], ink: Sequence[_Place]
) -> float:
    """What speaks against a name: points as near as its own, and what its line crosses."""
    own = min(_gap(found.box, place), _REACHES[1])
    doubt = _UNCLEAR if any(_gap(found.box, other) < own + 1.5 for other in others) else 0.0
    if found.led:
        steps = [step / 12 for step in range(1, 12)]
        way = [(place[0] + step * found.dx, place[1] + step * found.dy) for step in steps]
        # What is at the point itself is crossed by every line; and along its own bar is no harm.
        way = [(x, y) for x, y in way if hypot(x - place[0], y - place[1]) > _MARKER + _INK]
        foreign = [mark for mark in ink if abs(mark[0] - place[0]) > 0.1]
        doubt += _CROSSED * _met(way, others, _MARKER) + _CROSSED_INK * _met(way, foreign, _INK)
    return doubt


def _met(way: Sequence[_Place], marks: Sequence[_Place], reach: float) -> int:
    """How many places of a way have a mark within reach."""
    return sum(any(hypot(x - mark[0], y - mark[1]) < reach for mark in marks) for x, y in way)


def _gap(box: _Box, place: _Place) -> float:
    """From a place to the nearest of a box."""
    x, y = place
    return hypot(max(box[0] - x, 0.0, x - box[2]), max(box[1] - y, 0.0, y - box[3]))
