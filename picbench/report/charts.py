"""Small SVG plots: axes, ticks, lines. Colours are classes, so that a page's theme decides them.

Plots are drawn at the width of a narrow screen and only ever scaled up, so that text stays legible.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite, log, log10
from statistics import fmean, geometric_mean

import numpy as np
from markupsafe import Markup

from picbench.compare.intervals import Interval
from picbench.engines.config import BLOCK_SIZE
from picbench.engines.ledger import IDLE, KINDS
from picbench.report.contents import ArmFacts, RunContents
from picbench.report.sections import element
from picbench.store.reader import HELD, Series
from picbench.store.records import SampleRow
from picbench.store.summary import BASELINE

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


#: Steps that are drawn of an arm at most.
COLUMNS = 160

#: From the bottom: what requests hold, then what is idle.
STACKED = (*HELD, *(kind for kind in reversed(IDLE) if kind != "free"))


def memory_figure(contents: RunContents) -> HtmlFigure | None:
    """Blocks with KV in them by kind; None where the run has no block ledger."""
    ledger = {name: series for name, series in contents.ledger.items() if len(series.time)}
    if not ledger:
        return None
    highest = max(float(series.resident.max()) for series in ledger.values()) or 1.0
    seen = [k for k in STACKED if any(series.blocks[k].any() for series in ledger.values())]
    plots = [(name, _plot(name, series, highest, seen)) for name, series in ledger.items()]
    pools = ", ".join(f"{pool:,}" for pool in sorted({s.pool for s in ledger.values()}))
    caption = (
        f"Blocks of {BLOCK_SIZE} tokens, out of a pool of {pools}, on each arm's own "
        "clock, which stops while other arms compute; all plots have one scale. The free "
        "rest is not drawn."
    )
    if any(len(series.time) > COLUMNS for series in ledger.values()):
        caption += f" Of the steps, at most {COLUMNS} are drawn: the fullest of each interval."
    legend = [_entry(kind) for kind in reversed(seen)]
    return HtmlFigure("KV blocks over time", plots, legend, caption, contents.labels)


def columns(series: Series, count: int = COLUMNS) -> tuple[list[float], dict[str, list[float]]]:
    """Times and blocks by kind of `count` steps at most: of each interval its fullest step.

    Blocks of one step stay together, so that they still sum to the pool, and the peak stays.
    """
    steps = len(series.time)
    if steps <= count:
        chosen = np.arange(steps)
    else:
        edges = np.linspace(series.time[0], series.time[-1], count + 1)[1:-1]
        bins = np.searchsorted(edges, series.time, side="right")
        order = np.lexsort((-series.referenced, bins))
        chosen = order[np.unique(bins[order], return_index=True)[1]]
    return series.time[chosen].tolist(), {k: series.blocks[k][chosen].tolist() for k in KINDS}


def _plot(name: str, series: Series, highest: float, kinds: Sequence[str]) -> Markup:
    times, blocks = columns(series)
    end = max(float(series.time[-1]), times[0] + 1e-3)
    plot = Plot(
        Axis("seconds", times[0], end),
        Axis("blocks", 0, 1.04 * highest),
        f"Blocks over time of {name}",
    )
    base = [0.0] * len(times)
    areas = []
    for kind in kinds:
        top = [low + more for low, more in zip(base, blocks[kind], strict=True)]
        outline = [*_steps(plot, times, top, end), *reversed(_steps(plot, times, base, end))]
        shape = path(outline) + "Z"
        areas.append(element("path", element("title", kind), d=shape, class_=f"k-{kind}"))
        base = top
    return plot.draw(*areas)


def _steps(
    plot: Plot, times: Sequence[float], values: Sequence[float], end: float
) -> list[tuple[float, float]]:
    """A value holds until the next one begins."""
    ends = [*times[1:], end]
    return [
        plot.at(time, value)
        for begin, until, value in zip(times, ends, values, strict=True)
        for time in (begin, until)
    ]


def _entry(kind: str) -> LegendEntry:
    box = element("rect", width=12, height=12, class_=f"k-{kind}")
    mark = element("svg", box, viewBox="0 0 12 12", width="12", height="12", aria_hidden="true")
    return LegendEntry(mark, kind.replace("_", " "))


@dataclass(frozen=True, slots=True)
class ArmPoint:
    """An arm: its time (positive, less is better) and its score (more is better)."""

    arm: str
    time: float
    score: float
    time_interval: Interval | None = None
    score_interval: Interval | None = None


def frontier(points: Sequence[ArmPoint]) -> list[ArmPoint]:
    """The points that no other dominates, the fastest first.

    A point dominates another if it is as good in both and better in one; equal points stay both.
    """
    kept = [p for p in points if not any(_dominates(other, p) for other in points)]
    return sorted(kept, key=lambda point: (point.time, point.score))


def knee(points: Sequence[ArmPoint]) -> ArmPoint | None:
    """The point of a frontier that is farthest above the line between its ends.

    After Satopaa et al., "Finding a Kneedle in a Haystack" (2011), with logarithms of times, since
    times are compared as ratios. None where no point is above the line, or none is between.
    """
    if len(points) < 3:
        return None
    first, last = points[0], points[-1]
    span, rise = log(last.time / first.time), last.score - first.score
    if span <= 0 or rise <= 0:
        return None

    def above(point: ArmPoint) -> float:
        return (point.score - first.score) / rise - log(point.time / first.time) / span

    best = max(points[1:-1], key=above)
    return best if above(best) > 0 else None


def _dominates(one: ArmPoint, other: ArmPoint) -> bool:
    as_good = one.time <= other.time and one.score >= other.score
    return as_good and (one.time < other.time or one.score > other.score)


#: Points of a distribution's line.
_STEPS = 200

#: Groups of a trend, and requests in one at least.
_GROUPS, _GROUP = 20, 5

#: Where the number of an arm may stand beside its point, the best places first.
_PLACES = (
    *((9, -7), (-9, -7), (9, 15), (-9, 15), (0, -12), (0, 20), (16, 4), (-16, 4)),
    *((18, -16), (-18, -16), (18, 24), (-18, 24), (0, -24), (0, 32)),
)

#: Half the width of a number's digit and its height, with room: 1 beside 3 would be read as 13.
_DIGIT, _HEIGHT = 5.5, 12.0


def pareto_figure(contents: RunContents) -> HtmlFigure | None:
    """Mean score against the median of TTFT; None where no arm has both."""
    points = list(arm_points(contents.arms.values()))
    if not points:
        return None
    times = [v for p in points for v in (p.time, *_ends(p.time_interval))]
    scores = [v for p in points for v in (p.score, *_ends(p.score_interval))]
    plot = Plot(
        Axis.around("TTFT p50, ms", times, log=True),
        Axis.around(f"{contents.metric}, mean", scores),
        f"{contents.metric} against TTFT, by arm",
    )
    best = frontier(points)
    numbers = {name: place for place, name in enumerate(contents.arms)}
    marks = [_frontier_line(plot, best)]
    turn = knee(best)
    if turn is not None:
        x, y = plot.at(turn.time, turn.score)
        marks.append(element("circle", cx=x, cy=y, r=9, class_="knee", fill="none"))
    for point in points:
        marks.append(_point(plot, point, numbers[point.arm], point in best, contents.metric))
    marks += _labels(plot, points, numbers)
    caption = (
        "Up and to the left is better. Bars: 95 % for the median TTFT (over requests, and over "
        "repeats where there are several) and for the mean score (over sets of documents). Grey: "
        "another arm is as good in both and better in one. The line joins the others; "
    )
    caption += f"ring: the knee, {turn.arm}." if turn else "it has no knee."
    return HtmlFigure(
        "Score against time to the first token",
        [("", plot.draw(*marks))],
        [*arm_legend(list(contents.arms)), *([_ring()] if turn else [])],
        caption,
        contents.labels,
    )


def arm_points(arms: Iterable[ArmFacts]) -> Iterator[ArmPoint]:
    """The arms that have a score and a TTFT."""
    for arm in arms:
        median, score = arm.ttft_at(0.5), arm.summary.score.mean
        value = median.value if median.value is not None else next(iter(arm.ttft), None)
        if value is not None and score is not None:
            yield ArmPoint(arm.name, value, score, median.interval, arm.score_interval)


def ttft_figure(contents: RunContents) -> HtmlFigure | None:
    """The share of requests whose first token came in so many milliseconds, a line an arm."""
    timed = {name: arm.ttft for name, arm in contents.arms.items() if arm.ttft}
    if not timed:
        return None
    plot = Plot(
        Axis.around("TTFT, ms", (v for values in timed.values() for v in values), log=True),
        Axis("share of requests, %", 0, 100),
        "Distribution of TTFT, by arm",
    )
    lines = []
    for place, name in enumerate(contents.arms):
        if name in timed:
            shares = np.linspace(0, 100, min(_STEPS, len(timed[name])) + 1)
            values = np.percentile(timed[name], shares)
            points = list(zip(values.tolist(), shares.tolist(), strict=True))
            lines.append(_arm_line(plot, points, place, name))
    counts = sorted({len(values) for values in timed.values()})
    count = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return HtmlFigure(
        "Distribution of time to the first token",
        [("", plot.draw(*lines))],
        arm_legend(list(contents.arms)),
        f"Further left is faster; {count} requests an arm.",
        contents.labels,
    )


def trend_figure(contents: RunContents) -> HtmlFigure | None:
    """TTFT against full, and what was reused, over the run; None of too few requests."""
    base = contents.arms.get(BASELINE)
    full = {(row.sample, row.repeat): row.ttft_ms for row in base.rows if row.timed} if base else {}
    rows = {name: arm.rows for name, arm in contents.arms.items()}
    ratios = {name: _grouped(_ratios(of, full), geometric_mean) for name, of in rows.items()}
    reused = {name: _grouped(_reuse(of), fmean) for name, of in rows.items()}
    panels = [
        _trend(ratios, f"TTFT over {BASELINE}'s" if full else "TTFT, ms", "TTFT over the run"),
        _trend(reused, "tokens reused, %", "Reused tokens over the run"),
    ]
    plots = [("", panel) for panel in panels if panel is not None]
    if not plots:
        return None
    return HtmlFigure(
        "Trend over requests",
        plots,
        arm_legend(list(contents.arms)),
        "Geometric means (TTFT) and means (reuse) of neighbouring requests, in the order of the "
        "run. A gain that decays as the cache fills shows as a line that climbs towards 1.",
        contents.labels,
    )


def _trend(
    lines: Mapping[str, Sequence[tuple[float, float]]], label: str, title: str
) -> Markup | None:
    if not any(len(line) > 1 for line in lines.values()):
        return None
    points = [point for line in lines.values() for point in line]
    plot = Plot(
        Axis("request", 0, max(x for x, _ in points) * 1.03),
        Axis.around(label, [0.0, *(y for _, y in points)]),
        title,
    )
    drawn = [
        _arm_line(plot, line, place, name)
        for place, (name, line) in enumerate(lines.items())
        if len(line) > 1
    ]
    return plot.draw(*drawn)


def _ratios(
    rows: Sequence[SampleRow], full: Mapping[tuple[str, int], float | None]
) -> Iterator[float | None]:
    """TTFT over full's for the same sample, or TTFT itself where there is no full."""
    for row in rows:
        base = full.get((row.sample, row.repeat)) if full else 1.0
        yield row.ttft_ms / base if row.timed and row.ttft_ms and base else None


def _reuse(rows: Sequence[SampleRow]) -> Iterator[float | None]:
    """The share of each prompt that was reused, in percent."""
    for row in rows:
        reused, prompt = row.tokens.reused, row.tokens.prompt
        yield 100 * reused / prompt if prompt and reused is not None else None


def _grouped(
    values: Iterable[float | None], centre: Callable[[Sequence[float]], float]
) -> list[tuple[float, float]]:
    """The last request's number and the centre of each group of neighbours."""
    known = [(place, value) for place, value in enumerate(values, 1) if value is not None]
    size = max(_GROUP, -(-len(known) // _GROUPS))
    groups = [known[begin : begin + size] for begin in range(0, len(known), size)]
    return [
        (group[-1][0], centre([value for _, value in group]))
        for group in groups
        if 2 * len(group) >= size
    ]


def _arm_line(plot: Plot, points: Sequence[tuple[float, float]], place: int, name: str) -> Markup:
    line = plot.line(points, class_=f"arm {arm_class(place)}", stroke_dasharray=dashes(place))
    return element("g", element("title", f"{place + 1} {name}"), line)


def _frontier_line(plot: Plot, best: Sequence[ArmPoint]) -> Markup:
    return plot.line([(p.time, p.score) for p in best], class_="frontier")


def _point(plot: Plot, point: ArmPoint, place: int, kept: bool, metric: str) -> Markup:
    x, y = plot.at(point.time, point.score)
    bars = []
    if point.time_interval is not None:
        ends = [(end, point.score) for end in _ends(point.time_interval)]
        bars.append(plot.line(ends, class_="bar"))
    if point.score_interval is not None:
        ends = [(point.time, end) for end in _ends(point.score_interval)]
        bars.append(plot.line(ends, class_="bar"))
    name = f"{place + 1} {point.arm}{'' if kept else ', dominated'}"
    text = f"{name}: TTFT p50 {point.time:,.1f} ms, {metric} {point.score:.3f}"
    return element(
        "g",
        element("title", text),
        *bars,
        element("circle", cx=x, cy=y, r=4.5, class_="dot"),
        class_=f"point {arm_class(place)}" if kept else "point dominated",
    )


def _labels(plot: Plot, points: Sequence[ArmPoint], numbers: Mapping[str, int]) -> Iterator[Markup]:
    """The numbers of the arms, each where it hides neither a point nor another number."""
    # Middles and half widths of what is drawn; text stands above its y.
    taken = [(*plot.at(p.time, p.score), 4.5) for p in points]
    for point in points:
        x, y = plot.at(point.time, point.score)
        text = str(numbers[point.arm] + 1)
        width = _DIGIT * len(text)
        spots = [(x + dx, y + dy) for dx, dy in _PLACES]
        room = [_room(spot, width, taken) for spot in spots]
        spot = next((s for s, free in zip(spots, room, strict=True) if free >= 1), None)
        if spot is None:
            spot = spots[room.index(max(room))]
        taken.append((spot[0], spot[1] - 4, width))
        yield element("text", text, x=spot[0], y=spot[1], text_anchor="middle", class_="mark")


def _room(
    spot: tuple[float, float], width: float, taken: Sequence[tuple[float, float, float]]
) -> float:
    """How far the nearest thing is from a number at `spot`; below 1 they overlap."""
    return min(
        max(abs(spot[0] - x) / (width + half), abs(spot[1] - 4 - y) / _HEIGHT)
        for x, y, half in taken
    )


def _ring() -> LegendEntry:
    ring = element("circle", cx=13, cy=6, r=5, class_="knee", fill="none")
    mark = element("svg", ring, viewBox="0 0 26 12", width="26", height="12", aria_hidden="true")
    return LegendEntry(mark, "knee")


def _ends(interval: object) -> tuple[float, ...]:
    low, high = getattr(interval, "low", None), getattr(interval, "high", None)
    return () if low is None or high is None else (low, high)
