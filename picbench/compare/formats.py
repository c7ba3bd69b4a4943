"""A comparison as tables and sentences, in every format that people read."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict

from rich.console import Console

from picbench.compare.arm import ArmComparison, Drift, MetricChange
from picbench.compare.comparison import RunComparison
from picbench.statistics.intervals import FEW, Interval, Quantile
from picbench.statistics.significance import Loss
from picbench.tables.table import NOTHING, WIDTH, Column, Shown, Table, Value

#: Flipped samples that are listed; the JSON format has them all.
FLIPS = 10

#: Of the JSON document; it changes when a field goes or changes its meaning.
SCHEMA = 1

_LOSSES = {
    Loss.WITHIN: "loses less than {:g}, with 95 % confidence",
    Loss.BEYOND: "loses more than {:g}, with 95 % confidence",
    Loss.UNKNOWN: "may lose more than {:g} or less",
}


def _heading(arm: ArmComparison) -> str:
    """Which arm is compared with which, and over how much."""
    text = f"{arm.after} against {arm.before}: {arm.pairs} samples"
    clusters = {metric.change.clusters for metric in arm.metrics if not metric.change.ratio}
    if clusters and max(clusters) < arm.pairs:
        text += f" in {max(clusters)} groups that share documents"
    return f"{text}, {arm.unpaired} without a partner" if arm.unpaired else text


def metric_table(comparison: RunComparison, arm: ArmComparison) -> Table:
    """Scores and times."""
    head = ("metric", "before", "after", "change", "95 % interval", "p", "better/same/worse")
    rows: list[Sequence[Value]] = []
    for metric in arm.metrics:
        change, ratio = metric.change, metric.change.ratio
        pattern, ends = ("{:,.1f}", "{:.3f}") if ratio else ("{:.3f}", "{:+.4f}")
        rows.append(
            [
                metric.name if ratio else metric.name.replace("score", comparison.metric, 1),
                Shown(pattern.format(metric.before), metric.before),
                Shown(pattern.format(metric.after), metric.after),
                Shown(ends.format(change.value) + "x" * ratio, change.value),
                _interval(change.interval, ends) + drift_words(metric),
                Shown(_p(metric.p), metric.p),
                Shown(f"{metric.wins}/{change.equal}/{metric.losses}", metric.wins - metric.losses),
            ]
        )
    return Table("", [*map(Column, head)], rows)


def _parts(comparison: RunComparison, arm: ArmComparison) -> Iterator[Table | str]:
    """Metrics, quantiles, rates, counts that differ, samples that changed most; then notes."""
    tables: dict[Sequence[str], list[list[Value]]] = {
        ("quantile", "before (95 %)", "after (95 %)"): [
            [f"{of.name} p{100 * of.before.q:g}", _quantile(of.before), _quantile(of.after)]
            for of in arm.quantiles
        ],
        ("rate of the arm", "before", "after", "change"): [
            [
                rate.name,
                f"{rate.before:,.4g}",
                f"{rate.after:,.4g}",
                f"{rate.after / rate.before:.3f}x" if rate.before else NOTHING,
            ]
            for rate in arm.rates
        ],
        ("count", "before", "after", "samples that differ"): [
            [count.name, f"{count.before:,g}", f"{count.after:,g}", count.samples]
            for count in arm.counters
            if not count.same
        ],
        ("flipped sample", "before", "after"): [
            [flip.sample, flip.before, flip.after] for flip in arm.flips[:FLIPS]
        ],
    }
    if arm.metrics:
        yield metric_table(comparison, arm)
    for head, rows in tables.items():
        digits = 3 if head[0] == "flipped sample" else None
        if rows:
            yield Table("", [Column(title, digits) for title in head], rows)
    yield from arm_notes(comparison, arm)


def _quantile(found: Quantile) -> str:
    if found.value is None:
        return f"n={found.count}, needs {found.needed}"
    return f"{found.value:,.1f} ({_interval(found.interval, '{:,.1f}')})"


def _interval(interval: Interval | None, pattern: str) -> str:
    if interval is None:
        return NOTHING
    return f"{pattern.format(interval.low)} to {pattern.format(interval.high)}"


def _p(value: float) -> str:
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def arm_notes(comparison: RunComparison, arm: ArmComparison) -> Iterator[str]:
    """What the tables of an arm do not say."""
    same = [counter.name for counter in arm.counters if counter.same]
    if len(same) == len(arm.counters):
        yield f"All {len(same)} counts are the same."
    elif same:
        yield f"The same: {', '.join(same)}."
    found = arm.repeatability
    if found.pairs:
        yield f"{found.differing} of {found.pairs} answers have other tokens."
    more = len(arm.flips) - FLIPS
    if more > 0:
        yield f"{more} more samples flipped; the format json lists them."
    for metric in arm.metrics:
        yield from decision(metric, comparison)


def decision(metric: MetricChange, comparison: RunComparison) -> Iterator[str]:
    """What is known of a score: against the margin, and how many samples would say more."""
    margin = comparison.settings.margin
    if metric.change.ratio:
        return
    if metric.loss is not None and margin is not None:
        unknown = metric.loss is Loss.UNKNOWN and metric.needed
        more = f"; about {metric.needed:,} samples would decide" if unknown else ""
        yield f"{metric.name}: {_LOSSES[metric.loss].format(margin)}{more}."
    elif metric.needed and metric.needed > metric.change.pairs:
        yield f"{metric.name}: about {metric.needed:,} samples for an interval of one point."
    if metric.change.exact_p is not None:
        yield f"{metric.name}: exact McNemar p {_p(metric.change.exact_p)}, unadjusted."


def run_notes(comparison: RunComparison) -> Iterator[str]:
    """What holds for all arms."""
    for mismatch in comparison.mismatches:
        yield f"MISMATCH: {mismatch}"
    yield from comparison.notes
    if not comparison.meaningful:
        yield "Random or dummy weights: scores are not meaningful."
    yield f"p: of no change, adjusted for {comparison.tests} tests (Holm)."
    yield "Times: ratios of geometric means, over rounds of requests."
    yield f"Intervals: BCa bootstrap; over up to {FEW} rounds or sets of documents Student's t."
    sides = [side for arm in comparison.arms for q in arm.quantiles for side in (q.before, q.after)]
    for repeats in sorted({quantile.repeats for quantile in sides if quantile.interval}):
        yield f"Intervals of quantiles: {quantile_method(repeats)}."
    if comparison.before != comparison.after:
        yield (
            "Times of separate runs also drift, which no interval here has in it: compare how arms "
            "relate within each run."
        )
        return
    changes = [metric for arm in comparison.arms for metric in arm.metrics]
    if any(metric.drift is Drift.UNSEEN for metric in changes):
        yield (
            "Drift not included: one arm served all requests, then the next one. If the machine "
            "got slower or faster meanwhile, these ratios have that in them, but not their "
            "intervals and p; three repeats or more put it there."
        )
    repeated = {m.change.repeats for m in changes if m.drift is Drift.REPEATS}
    if repeated:
        few = (
            " Two repeats say little of others: more make these narrower." if 2 in repeated else ""
        )
        yield (
            "Over repeats: one arm served all requests, then the next one. What the machine did "
            f"meanwhile is in these intervals as far as it differs from repeat to repeat.{few}"
        )


def drift_words(metric: MetricChange) -> str:
    """What stands after the interval of a time whose two sides did not take turns; else nothing."""
    if metric.drift is Drift.REPEATS:
        return f", over {metric.change.repeats} repeats"
    return ", drift not included" if metric.drift is Drift.UNSEEN else ""


def quantile_method(repeats: int) -> str:
    """How the intervals of quantiles are made, and what is not in them."""
    if repeats < 2:
        return (
            "order statistics of the requests of one repeat; what else the machine does at another "
            "time is not in them"
        )
    few = "; two repeats say little of others, so they are wide" if repeats == 2 else ""
    return f"order statistics over requests, and Student's t over {repeats} repeats{few}"


def _json(comparison: RunComparison) -> str:
    """One line, with every flipped sample."""
    return json.dumps({"schema": SCHEMA, **asdict(comparison)}, allow_nan=False)


def _markdown(comparison: RunComparison) -> str:
    parts = [f"## {comparison.after} against {comparison.before}"]
    for arm in comparison.arms:
        parts.append(f"### {_heading(arm)}")
        for part in _parts(comparison, arm):
            parts.append(part if isinstance(part, str) else part.markdown(right=1))
    notes = "\n".join(f"- {note}" for note in run_notes(comparison))
    return "\n\n".join([*parts, notes]) + "\n"


def _text(comparison: RunComparison) -> str:
    parts: list[str | Table] = []
    if comparison.before != comparison.after:
        parts.append(f"before: {comparison.before}\nafter:  {comparison.after}")
    for arm in comparison.arms:
        parts += [f"\n{_heading(arm)}", *_parts(comparison, arm)]
    console = Console(width=WIDTH, highlight=False, no_color=True)
    with console.capture() as captured:
        for part in (*parts, "", *run_notes(comparison)):
            console.print(part, markup=False)
    return captured.get()


#: By the name that users give.
FORMATS: Mapping[str, Callable[[RunComparison], str]] = {
    "text": _text,
    "json": _json,
    "markdown": _markdown,
    "github": _markdown,
}
