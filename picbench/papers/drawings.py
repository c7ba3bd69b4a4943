"""A paper's drawings: what of the evidence goes into each panel."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean, mode, stdev

from picbench.figures.canvas import Panel
from picbench.figures.panels import (
    Spot,
    draw_bars,
    draw_dots,
    draw_lines,
    draw_scatter,
    draw_time,
    percent_floor,
)
from picbench.papers.arm_scores import RowInterval, ratio_of
from picbench.papers.data import ExperimentData, quartiles
from picbench.papers.judge import TESTBED, Evidence, ends
from picbench.papers.settings import Drawing, Published

#: Arms of score panels that are joined by a line, as they differ in one number.
_FAMILIES = ("epic", "cacheblend")

#: With more points than these, which are then evenly spaced, every fourth is named.
_MOST_TICKS = 12


def draw(
    drawing: Drawing, experiment: str, evidence: Evidence, published: Published, folder: Path
) -> list[str]:
    """Draw a panel for each device that has the data; the names of files without their suffix."""
    if drawing.kind == "kept":
        return _draw_kept(drawing, evidence, folder)
    scores = drawing.kind == "scores"
    made = []
    for whole in evidence.experiment(drawing.metric if scores else experiment):
        name = f"{drawing.name}-{whole.device}"
        if scores:
            drawn = _draw_scores(drawing, evidence, whole, published, folder / name)
        elif drawn := bool((data := whole.at(drawing.points or whole.labels)).points):
            _KINDS[drawing.kind](drawing, data, published, folder / name)
        made += [name] if drawn else []
    return made


def _note(data: ExperimentData) -> str:
    how = (
        f"Median of {data.repeated} repeats, bars: quartiles."
        if data.single_requests
        else f"Mean of {data.repeated} {data.repeats}, bars: sd."
    )
    return " ".join((_origin(data), how, *_fewer(data)))


def _fewer(data: ExperimentData) -> Iterator[str]:
    """Points of fewer requests than most: what a whole load takes is less there."""
    counts = {point.label: int(point.facts.get("requests") or 0) for point in data.points}
    usual = mode(counts.values())
    # Where every point has its own number, that is what the figure is about.
    if len(set(counts.values())) < len(counts):
        for label, count in counts.items():
            if count < usual:
                yield f"At {label}: {count} requests, not {usual}."


def _origin(data: ExperimentData) -> str:
    """Where points come from; hardware first, since names of models begin with small letters."""
    about = data.conditions
    return f"{about['hardware']}, commit {about['commit']}; {about['model']}, {_inputs(data)}."


def _inputs(data: ExperimentData) -> str:
    """What requests were made of."""
    return "random tokens" if data.single_requests else "synthetic rows"


def _spot(data: ExperimentData, label: str, arm: str, metric: str, x: float) -> Spot | None:
    values = data.values(label, arm, metric).values()
    if not values:
        return None
    if data.single_requests:
        low, middle, high = quartiles(values)
        return Spot(x, middle, low, high)
    mean, deviation = fmean(values), (stdev(values) if len(values) > 1 else 0.0)
    return Spot(x, mean, mean - deviation, mean + deviation)


def _place(label: str, number: int) -> float:
    """Where a point is drawn: at its number, or at its place in the list."""
    try:
        return float(label)
    except ValueError:
        return float(number)


def _draw_lines(drawing: Drawing, data: ExperimentData, published: Published, base: Path) -> None:
    places = {label: _place(label, number) for number, label in enumerate(data.labels)}
    lines = {
        arm: [
            spot
            for label, x in places.items()
            if (spot := _spot(data, label, arm, drawing.metric, x)) is not None
        ]
        for arm in drawing.arms or data.arms
    }
    many = len(places) > _MOST_TICKS
    wide = max(places.values()) > 10 * max(1e-9, min(places.values())) and not many
    ticks = {x: _thousands(label) for label, x in list(places.items())[:: 4 if many else 1]}
    panel = Panel(
        data.varies,
        drawing.label,
        f"{_note(data)} {_hollow(drawing, published) if drawing.published else ''}".rstrip(),
        log_x=wide and min(places.values()) > 0,
        log_y=drawing.log,
    )
    printed = {
        arm: [(places[label], value) for label, value in values.items() if label in places]
        for arm, values in drawing.published.items()
    }
    draw_lines(panel, {arm: spots for arm, spots in lines.items() if spots}, ticks, base, printed)


def _thousands(label: str) -> str:
    return f"{int(label) / 1024:g}k" if label.isdigit() and int(label) >= 1024 else label


def _draw_dots(drawing: Drawing, data: ExperimentData, published: Published, base: Path) -> None:
    ours: dict[str, dict[str, Spot]] = {f"{label}-like": {} for label in data.labels}
    theirs: dict[str, dict[str, Spot]] = {name: {} for name in ours}
    for label, arm in product(data.labels, data.arms):
        if (found := _spot(data, label, arm, drawing.metric, 0)) is not None:
            ours[f"{label}-like"][arm] = Spot(found.y, 0, found.low, found.high)
        if (printed := published.result(label, drawing.printed, arm)) is not None:
            mean, sd = printed
            theirs[f"{label}-like"][arm] = Spot(mean, 0, mean - sd, mean + sd)
    note = f"{_note(data)} Hollow: printed, {published.label}."
    draw_dots(Panel(drawing.label, "", note, log_x=drawing.log), ours, theirs, base)


def _draw_bars(drawing: Drawing, data: ExperimentData, _: Published, base: Path) -> None:
    labels = [drawing.at] if drawing.at in data.labels else data.labels
    bars = {
        arm if len(labels) == 1 else f"{arm}, {label}": Spot(spot.y, 0, spot.low, spot.high)
        for label in labels
        for arm in data.arms
        if (spot := _spot(data, label, arm, drawing.metric, 0)) is not None
    }
    where = f" Prompt: {labels[0]} tokens." if drawing.at in data.labels else ""
    draw_bars(Panel(drawing.label, "", f"{_note(data)}{where}", log_x=drawing.log), bars, base)


def _draw_time(drawing: Drawing, data: ExperimentData, _: Published, base: Path) -> None:
    panels = {
        f"{point.label}-like": {
            arm: (found.series.time, found.series.share)
            for arm, found in point.arms.items()
            if found.series is not None
        }
        for point in data.points
        if point.seed == data.seeds[0]
    }
    note = f"{_origin(data)} One seed."
    draw_time(Panel("time, s", drawing.label, note), panels, base)


_Kind = Callable[[Drawing, ExperimentData, Published, Path], None]

_KINDS: Mapping[str, _Kind] = {
    "lines": _draw_lines,
    "dots": _draw_dots,
    "bars": _draw_bars,
    "time": _draw_time,
}


def _kept(evidence: Evidence, arm: str, dataset: str) -> RowInterval | None:
    """The share of full recompute's score that an arm keeps; None where it was not scored."""
    one, full = evidence.rows(arm, dataset), evidence.rows("full", dataset)
    return ratio_of(one, full) if one and full else None


def _percent(found: RowInterval, x: float, name: str = "") -> Spot:
    return Spot(x, 100 * found.value, 100 * found.low, 100 * found.high, name)


def _score_note(evidence: Evidence, datasets: Sequence[str]) -> str:
    facts = [part.facts for name in datasets if (part := evidence.part("full", name))]
    counts = ends(len(evidence.rows("full", name) or ()) for name in datasets)
    where = f"{facts[0]['gpu']}, {facts[0]['dtype']}, commit {facts[0]['commit'][:7]}"
    return f"Scores: {TESTBED}, synthetic rows, n={counts}; {where}; vertical bars: 95 %."


def _draw_scores(
    drawing: Drawing, evidence: Evidence, data: ExperimentData, published: Published, base: Path
) -> bool:
    """Draw what families of arms keep against their time; whether there is any."""
    families: dict[str, list[Spot]] = {}
    printed: dict[str, list[Spot]] = {}
    for arm in data.arms:
        ttft = _spot(data, drawing.at, arm, "ttft_ms", 0)
        kept = _kept(evidence, arm, drawing.dataset)
        if ttft is not None and kept is not None:
            name, _, option = arm.partition(":")
            families.setdefault(name, []).append(_percent(kept, ttft.y, option))
            if theirs := drawing.published.get(arm):
                low, high = theirs["low"], theirs["high"]
                printed.setdefault(name, []).append(Spot(ttft.y, (low + high) / 2, low, high))
    if not families:
        return False
    for name in families.keys() & set(_FAMILIES):
        families[name].sort(key=lambda spot: _option(spot.name))
    titles = {name: _title(name, spots) for name, spots in families.items()}
    about = data.conditions
    times = f"Time: {drawing.at} {_inputs(data)}, {about['hardware']}, commit {about['commit']}, "
    times += f"median of {data.repeated} repeats."
    note = f"{drawing.dataset}-like. {_score_note(evidence, [drawing.dataset])} {times}"
    note += f" {_hollow(drawing, published)}" if printed else ""
    draw_scatter(
        Panel("time to the first token, ms", drawing.label, note, log_x=True),
        {titles[name]: _last_named(name, spots) for name, spots in families.items()},
        [titles[name] for name in _FAMILIES if name in titles],
        base,
        {titles[name]: spots for name, spots in printed.items()},
    )
    return True


def _hollow(drawing: Drawing, published: Published) -> str:
    """What hollow marks are: the paper's words, and what it measured on."""
    return f"Hollow: {drawing.printed}; {published.label}."


def _option(name: str) -> float:
    return float(name.partition("=")[2] or 0)


def _title(family: str, spots: Sequence[Spot]) -> str:
    """A family, and from where to where the number of its arms goes."""
    if family not in _FAMILIES or len(spots) < 2:
        return family
    first, last = spots[0].name.split("="), spots[-1].name.split("=")
    return f"{family}, {first[0]} = {first[-1]} to {last[-1]}"


def _last_named(family: str, spots: Sequence[Spot]) -> list[Spot]:
    """The last spot of a family shows which way it goes; names of more would cover its points."""
    if family not in _FAMILIES:
        return list(spots)
    return [*(replace(spot, name="") for spot in spots[:-1]), spots[-1]]


def _draw_kept(drawing: Drawing, evidence: Evidence, folder: Path) -> list[str]:
    """A line a data set: kept against the share of tokens, which the arms' names have."""
    datasets = evidence.datasets()
    lines = {
        f"{dataset}-like": [
            _percent(kept, 100 * _option(arm))
            for arm in drawing.arms
            if (kept := _kept(evidence, arm, dataset)) is not None
        ]
        for dataset in datasets
    }
    lines = {name: spots for name, spots in lines.items() if spots}
    if not lines:
        return []
    ticks = {100 * _option(arm): f"{100 * _option(arm):g}" for arm in drawing.arms}
    note = _score_note(evidence, datasets)
    draw_lines(
        Panel("recomputed, % of chunk tokens", drawing.label, note),
        lines,
        ticks,
        folder / drawing.name,
        bottom=percent_floor(lines.values()),
    )
    return [drawing.name]
