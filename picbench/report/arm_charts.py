"""Figures about the arms of a run: score against TTFT, the distribution of TTFT, the trend."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean, geometric_mean

import numpy as np
from markupsafe import Markup

from picbench.output.sample_row import SampleRow
from picbench.output.summary import BASELINE
from picbench.report.markup import element
from picbench.report.pareto import ArmPoint, frontier, knee
from picbench.report.plot import (
    Axis,
    HtmlFigure,
    LegendEntry,
    Plot,
    arm_class,
    arm_legend,
    dashes,
)
from picbench.report.run_contents import ArmFacts, RunContents

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
