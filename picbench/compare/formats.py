"""A comparison in words and cells, for every format that people read."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from picbench.compare.arm import ArmComparison, CounterChange, Drift, MetricChange
from picbench.compare.comparison import RunComparison
from picbench.compare.intervals import FEW, Interval, Quantile
from picbench.compare.significance import Loss
from picbench.run.result import WIDTH
from picbench.tables.table import table as markdown_table

#: Flipped samples that are listed; the JSON format has them all.
FLIPS = 10

NOTHING = "-"

METRIC_HEAD = ("metric", "before", "after", "change", "95 % interval", "p", "better/same/worse")
QUANTILE_HEAD = ("quantile", "before (95 %)", "after (95 %)")
COUNTER_HEAD = ("count", "before", "after", "samples that differ")
FLIP_HEAD = ("flipped sample", "before", "after")


@dataclass(frozen=True, slots=True)
class TextTable:
    """Cells as text; the first column is a name."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def heading(comparison: RunComparison, arm: ArmComparison) -> str:
    """Which arm is compared with which, and over how much."""
    text = f"{arm.after} against {arm.before}: {arm.pairs} samples"
    clusters = {metric.change.clusters for metric in arm.metrics if not metric.change.ratio}
    if clusters and max(clusters) < arm.pairs:
        text += f" in {max(clusters)} groups that share documents"
    return f"{text}, {arm.unpaired} without a partner" if arm.unpaired else text


def metric_table(comparison: RunComparison, arm: ArmComparison) -> TextTable:
    """Scores and times."""
    return TextTable(METRIC_HEAD, [_metric(metric, comparison.metric) for metric in arm.metrics])


def quantile_table(arm: ArmComparison) -> TextTable:
    """Quantiles of TTFT, each with its interval; none from too few requests."""
    rows = [
        (f"{found.name} p{100 * found.before.q:g}", *map(_quantile, (found.before, found.after)))
        for found in arm.quantiles
    ]
    return TextTable(QUANTILE_HEAD, rows)


def counter_table(arm: ArmComparison) -> TextTable:
    """Counts that differ; none if all are the same."""
    return TextTable(COUNTER_HEAD, [_counter(c) for c in arm.counters if not c.same])


def flip_table(arm: ArmComparison) -> TextTable:
    """The samples whose score changed most."""
    rows = [(f.sample, _score(f.before), _score(f.after)) for f in arm.flips[:FLIPS]]
    return TextTable(FLIP_HEAD, rows)


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


def run_notes(comparison: RunComparison) -> Iterator[str]:
    """What holds for all arms."""
    for mismatch in comparison.mismatches:
        yield f"MISMATCH: {mismatch}"
    yield from comparison.notes
    if not comparison.meaningful:
        yield "Random or dummy weights: scores are not meaningful."
    yield f"p: of no change, adjusted for {comparison.tests} tests (Holm)."
    yield "Times: ratios of geometric means, over rounds of requests."
    yield (f"Intervals: BCa bootstrap; over up to {FEW} rounds or sets of documents Student's t.")
    yield from _quantile_notes(comparison)
    yield from _drift_notes(comparison)
    if comparison.before != comparison.after:
        yield (
            "Times of separate runs also drift, which no interval here has in it: compare how arms "
            "relate within each run."
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


def _quantile_notes(comparison: RunComparison) -> Iterator[str]:
    found = [side for arm in comparison.arms for q in arm.quantiles for side in (q.before, q.after)]
    for repeats in sorted({quantile.repeats for quantile in found if quantile.interval}):
        yield f"Intervals of quantiles: {quantile_method(repeats)}."


def _drift_notes(comparison: RunComparison) -> Iterator[str]:
    """Of the arms of one run; two runs always drift."""
    if comparison.before != comparison.after:
        return
    changes = [metric for arm in comparison.arms for metric in arm.metrics]
    if any(metric.drift is Drift.UNSEEN for metric in changes):
        yield (
            "Drift not included: one arm served all requests, then the next one. If the machine "
            "got slower or faster meanwhile, these ratios have that in them, but not their "
            "intervals and p; three repeats or more put it there."
        )
    repeats = {m.change.repeats for m in changes if m.drift is Drift.REPEATS}
    if repeats:
        few = " Two repeats say little of others: more make these narrower." if 2 in repeats else ""
        yield (
            "Over repeats: one arm served all requests, then the next one. What the machine did "
            f"meanwhile is in these intervals as far as it differs from repeat to repeat.{few}"
        )


def decision(metric: MetricChange, comparison: RunComparison) -> Iterator[str]:
    """What is known of a score: against the margin, and how many samples would say more."""
    margin = comparison.settings.margin
    if metric.change.ratio:
        return
    if metric.loss is not None and margin is not None:
        verdict = {
            Loss.WITHIN: f"loses less than {margin:g}, with 95 % confidence",
            Loss.BEYOND: f"loses more than {margin:g}, with 95 % confidence",
            Loss.UNKNOWN: f"may lose more than {margin:g} or less",
        }[metric.loss]
        more = ""
        if metric.loss is Loss.UNKNOWN and metric.needed:
            more = f"; about {metric.needed:,} samples would decide"
        yield f"{metric.name}: {verdict}{more}."
    elif metric.needed and metric.needed > metric.change.pairs:
        yield f"{metric.name}: about {metric.needed:,} samples for an interval of one point."
    if metric.change.exact_p is not None:
        yield f"{metric.name}: exact McNemar p {_p(metric.change.exact_p)}, unadjusted."


def _metric(metric: MetricChange, score: str) -> tuple[str, ...]:
    change = metric.change
    number = _time if change.ratio else _score
    name = metric.name.replace("score", score, 1) if not change.ratio else metric.name
    return (
        name,
        number(metric.before),
        number(metric.after),
        f"{change.value:.3f}x" if change.ratio else f"{change.value:+.4f}",
        _interval(change.interval, "{:.3f}" if change.ratio else "{:+.4f}") + drift_words(metric),
        _p(metric.p),
        f"{metric.wins}/{change.equal}/{metric.losses}",
    )


def _quantile(found: Quantile) -> str:
    if found.value is None:
        return f"n={found.count}, needs {found.needed}"
    return f"{_time(found.value)} ({_interval(found.interval, '{:,.1f}')})"


def _counter(counter: CounterChange) -> tuple[str, ...]:
    samples = NOTHING if counter.samples is None else f"{counter.samples:,}"
    return counter.name, f"{counter.before:,g}", f"{counter.after:,g}", samples


def _interval(interval: Interval | None, pattern: str) -> str:
    if interval is None:
        return NOTHING
    return f"{pattern.format(interval.low)} to {pattern.format(interval.high)}"


def _p(value: float) -> str:
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def _score(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3f}"


def _time(value: float) -> str:
    return f"{value:,.1f}"


#: Of the JSON document; it changes when a field goes or changes its meaning.
SCHEMA = 1


def comparison_document(comparison: RunComparison) -> dict[str, Any]:
    """The comparison as JSON values, with every flipped sample."""
    return {"schema": SCHEMA, **asdict(comparison)}


def comparison_json(comparison: RunComparison) -> str:
    """The document on one line."""
    return json.dumps(comparison_document(comparison), allow_nan=False)


def comparison_markdown(comparison: RunComparison) -> str:
    """Headings, tables and notes in Markdown."""
    return "\n\n".join(_markdown(comparison)) + "\n"


def comparison_text(comparison: RunComparison, width: int = WIDTH) -> str:
    """Tables and notes for a terminal."""
    console = Console(width=width, highlight=False, no_color=True)
    with console.capture() as captured:
        for part in _text(comparison):
            console.print(part, markup=False)
    return captured.get()


#: By the name that users give.
FORMATS: Mapping[str, Callable[[RunComparison], str]] = {
    "text": comparison_text,
    "json": comparison_json,
    "markdown": comparison_markdown,
    "github": comparison_markdown,
}


def _markdown(comparison: RunComparison) -> Iterator[str]:
    yield f"## {comparison.after} against {comparison.before}"
    for arm in comparison.arms:
        yield f"### {heading(comparison, arm)}"
        for table in _tables(comparison, arm):
            cells = [[cell.replace("|", "\\|") for cell in row] for row in table.rows]
            yield markdown_table(table.head, cells, right=1)
        yield from arm_notes(comparison, arm)
    yield "\n".join(f"- {note}" for note in run_notes(comparison))


def _text(comparison: RunComparison) -> Iterator[str | Text | Table]:
    if comparison.before != comparison.after:
        yield f"before: {comparison.before}\nafter:  {comparison.after}"
    for arm in comparison.arms:
        yield f"\n{heading(comparison, arm)}"
        for table in _tables(comparison, arm):
            yield _rich(table)
        yield from arm_notes(comparison, arm)
    yield ""
    yield from run_notes(comparison)


def _tables(comparison: RunComparison, arm: ArmComparison) -> Iterator[TextTable]:
    tables = (
        metric_table(comparison, arm),
        quantile_table(arm),
        counter_table(arm),
        flip_table(arm),
    )
    for table in tables:
        if table.rows:
            yield table


def _rich(table: TextTable) -> Table:
    found = Table()
    found.add_column(table.head[0], no_wrap=True)
    for name in table.head[1:]:
        found.add_column(name, justify="right")
    for row in table.rows:
        found.add_row(*(Text(cell) for cell in row))
    return found
