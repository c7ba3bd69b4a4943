"""Small SVG plots: axes, ticks, lines. Colours are classes, so that a page's theme decides them.

Plots are drawn at the width of a narrow screen and only ever scaled up, so that text stays legible.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite, log10

from markupsafe import Markup

from picbench.report.markup import element

#: Units of the view box; at 400 px of screen one unit is about a pixel.
WIDTH, HEIGHT = 380, 250

_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 12, 10, 38

#: Ticks on an axis at most.
_TICKS = 6

#: Of lines, so that these are told apart without colours.
_DASHES = (None, "7 3", "2 2", "8 3 2 3")

#: Colours that the style sheet has for arms.
COLOURS = 8

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Axis:
    """Values from `low` to `high`; `log` axes have positive ones."""

    label: str
    low: float
    high: float
    log: bool = False

    @classmethod
    def around(cls, label: str, values: Iterable[float], *, log: bool = False) -> "Axis":
        """An axis with room around `values`, of which there is one at least."""
        known = [value for value in values if isfinite(value) and (value > 0 or not log)]
        low, high = min(known), max(known)
        if log:
            return cls(label, low / 1.15, high * 1.15, log=True)
        room = 0.06 * (high - low) or 0.06 * abs(high) or 1.0
        return cls(label, low - room, high + room)

    @property
    def ticks(self) -> list[float]:
        """Round values, two at least on any axis that has some span."""
        found = self._powers() if self.log else []
        return found if len(found) > 1 else self._multiples()

    def share(self, value: float) -> float:
        """Where a value is, from 0 to 1."""
        if self.log:
            return log10(max(value, self.low) / self.low) / log10(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def _powers(self) -> list[float]:
        first, last = floor(log10(self.low)), ceil(log10(self.high))
        for steps, stride in (((1, 2, 5), 1), ((1, 3), 1), ((1,), 1), ((1,), 2), ((1,), 4)):
            decades = range(first, last + 1, stride)
            values = [step * 10.0**decade for decade in decades for step in steps]
            inside = [value for value in values if self.low <= value <= self.high]
            if len(inside) <= _TICKS:
                break
        return inside

    def _multiples(self) -> list[float]:
        rough = (self.high - self.low) / (_TICKS - 1)
        unit = 10.0 ** floor(log10(rough))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
        first, last = ceil(self.low / step), floor(self.high / step)
        return [round(step * number, 12) for number in range(first, last + 1)]


@dataclass(frozen=True, slots=True)
class Plot:
    """Two axes; marks are drawn at the places that `at` gives."""

    x: Axis
    y: Axis
    title: str

    def at(self, x: float, y: float) -> tuple[float, float]:
        """The place of a point in the view box."""
        return (
            _LEFT + self.x.share(x) * (WIDTH - _LEFT - _RIGHT),
            HEIGHT - _BOTTOM - self.y.share(y) * (HEIGHT - _TOP - _BOTTOM),
        )

    def line(self, points: Points, **attributes: str | float | None) -> Markup:
        """Points joined by straight lines."""
        return element("path", d=path(self.at(x, y) for x, y in points), fill="none", **attributes)

    def draw(self, *marks: Markup) -> Markup:
        """The plot as an SVG element with its title as the text for those who cannot see it."""
        return element(
            "svg",
            element("title", self.title),
            *self._frame(),
            *marks,
            viewBox=f"0 0 {WIDTH} {HEIGHT}",
            role="img",
            aria_label=self.title,
            class_="plot",
        )

    def _frame(self) -> Iterable[Markup]:
        left, bottom = _LEFT, HEIGHT - _BOTTOM
        right = WIDTH - _RIGHT
        for value in self.x.ticks:
            x, _ = self.at(value, self.y.low)
            yield element("line", x1=x, x2=x, y1=_TOP, y2=bottom, class_="grid")
            # A tick at the end would be cut by the edge.
            near = min(max(x, left), right - 8)
            yield element("text", number(value), x=near, y=bottom + 15, text_anchor="middle")
        for value in self.y.ticks:
            _, y = self.at(self.x.low, value)
            yield element("line", x1=left, x2=right, y1=y, y2=y, class_="grid")
            yield element("text", number(value), x=left - 5, y=y + 4, text_anchor="end")
        yield element("path", d=f"M{left} {_TOP}V{bottom}H{right}", class_="axis", fill="none")
        yield element(
            "text", self.x.label, x=(left + right) / 2, y=HEIGHT - 6, text_anchor="middle"
        )
        middle = (_TOP + bottom) / 2
        yield element(
            "text",
            self.y.label,
            x=12,
            y=middle,
            text_anchor="middle",
            transform=f"rotate(-90 12 {middle:g})",
        )


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """What a colour stands for: a sample of the mark, and the name."""

    mark: Markup
    name: str


@dataclass(frozen=True, slots=True)
class HtmlFigure:
    """Plots with one legend and caption; `labels` say what numbers are not, such as measured."""

    title: str
    plots: Sequence[tuple[str, Markup]]
    legend: Sequence[LegendEntry]
    caption: str
    labels: Sequence[str] = ()


def arm_class(place: int) -> str:
    """The style sheet's class of the arm at this place, from 0."""
    return f"a{place % COLOURS}"


def dashes(place: int) -> str | None:
    """The dashes of an arm's line; with its colour they repeat after 32 arms."""
    return _DASHES[(place + place // COLOURS) % len(_DASHES)]


def arm_legend(arms: Sequence[str]) -> list[LegendEntry]:
    """Arms with the number that figures write beside a point, and their line."""
    return [
        LegendEntry(
            element(
                "svg",
                element(
                    "line",
                    x1=0,
                    x2=26,
                    y1=6,
                    y2=6,
                    class_=f"arm {arm_class(place)}",
                    stroke_dasharray=dashes(place),
                ),
                viewBox="0 0 26 12",
                width="26",
                height="12",
                aria_hidden="true",
            ),
            f"{place + 1} {arm}",
        )
        for place, arm in enumerate(arms)
    ]


def path(points: Iterable[tuple[float, float]]) -> str:
    """Straight lines in SVG's notation, to a tenth of a unit."""
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def number(value: float) -> str:
    """A tick's label."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"
