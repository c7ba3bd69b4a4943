"""Names beside points, where they hide least and it is clear whose they are."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import hypot
from typing import TYPE_CHECKING

from picbench.output.figures.paper_canvas import NOTE, outline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
