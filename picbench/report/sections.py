"""The tables of a report: a value is shown with its interval, and is sorted by its number."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from picbench.compare.arm import MetricChange
from picbench.compare.comparison import RunComparison
from picbench.compare.formats import (
    arm_notes,
    decision,
    metric_table,
    quantile_method,
    run_notes,
)
from picbench.report.contents import ArmFacts, RunContents, drop_at_most, ratio_ends, unseen_loss
from picbench.statistics.intervals import Interval
from picbench.statistics.significance import Loss
from picbench.store.summary import BASELINE
from picbench.tables.metrics import SCORE, Metric, metrics_shown
from picbench.tables.run import cache_lines
from picbench.tables.table import NOTHING, Column, Shown, Table, Value

#: What is said of a loss against the margin.
_LOSSES = {Loss.WITHIN: "within", Loss.BEYOND: "beyond", Loss.UNKNOWN: "undecided"}

#: Of a worker's memory, with their headings.
_PARTS = {
    "weights_bytes": "weights",
    "pool_bytes": "KV pool",
    "workspace_bytes": "workspaces",
    "residual_bytes": "residual",
    "held_bytes": "held",
    "driver_bytes": "driver",
}


def arm_table(contents: RunContents) -> Table:
    """A row for each arm; quantiles with intervals, and none from too few requests."""
    metrics = metrics_shown(contents.summaries.values(), "report")
    ratios = {arm.after: arm.metric("ttft_ms") for arm in contents.compared}
    rows = [
        [name, *(_metric(metric, arm, ratios.get(name)) for metric in metrics)]
        for name, arm in contents.arms.items()
    ]
    repeats = max(arm.ttft_at(0.5).repeats for arm in contents.arms.values())
    cache = cache_lines(contents.manifest["config"].get("cache"), contents.summaries)
    lines = [line.replace("`", "") for line in cache]
    notes = [
        f"{contents.metric}: mean, unparsed replies as 0, with 95 % over sets of documents.",
        f"TTFT: milliseconds, with 95 % from {quantile_method(repeats)}; p90 needs 10 "
        "requests, p99 100.",
        "Blocks: most that running requests held at a time. Reused and computed: shares of the "
        "prompts; computed includes chunks that were compiled to be reused.",
        *(lines or [f"Cache: {contents.manifest['cache']}."]),
    ]
    head = [Column("arm"), *(Column(metric.title.removesuffix(" %")) for metric in metrics)]
    return Table("Arms", head, rows, notes)


def _metric(metric: Metric, arm: ArmFacts, ratio: MetricChange | None) -> Value:
    if metric.quantile is not None:
        found = arm.ttft_at(metric.quantile)
        if found.value is None and found.count:
            return f"n < {found.needed}"
        return with_interval(found.value, found.interval, "{:,.1f}")
    if metric.over_full:
        if ratio is None:
            return None
        ends = ratio_ends(ratio)
        return Shown(f"{ratio.change.value:.2f}x{f' ({ends})' if ends else ''}", ratio.change.value)
    value = metric.value(arm.summary)
    if metric.name == SCORE:
        return with_interval(value, arm.score_interval, "{:.3f}")
    if metric.unit == "req/s":
        return None if value is None else Shown(f"{value:.2f}", value)
    shown = metric.text(arm.summary)
    return None if shown is None else Shown(shown, value)


def with_interval(value: float | None, interval: Interval | None, pattern: str) -> Value:
    """A number with the interval of 95 % after it, where there is one."""
    if value is None:
        return None
    text = pattern.format(value)
    if interval is not None:
        text += f" ({pattern.format(interval.low)} to {pattern.format(interval.high)})"
    return Shown(text, value)


def decay_table(contents: RunContents) -> Iterator[Table]:
    """What caches gave over a steady stream, a row for each window; none of other runs."""
    rows = [
        [
            name,
            window.first,
            window.requests,
            None if window.ttft_ms is None else window.ttft_ms.p50,
            None if (ratio := window.ttft_vs_full) is None else _share(ratio.geomean, "x"),
            _share(window.expected_tokens, " %", window.prompt_tokens),
            _share(window.found_tokens, " %", window.prompt_tokens),
        ]
        for name, arm in contents.summaries.items()
        if arm.cache is not None
        for window in arm.cache.decay
    ]
    head = (
        *("arm", "from request", "requests", "TTFT p50 ms", f"TTFT vs {BASELINE}"),
        *("a cache without limits has", "found"),
    )
    notes = ["Shares of prompts' tokens. What is there and not found was evicted."]
    if rows:
        yield Table("Decay over a steady stream", [*map(Column, head)], rows, notes)


def _share(value: float, unit: str, whole: float | None = None) -> Value:
    """A ratio, or a count in percent of the whole."""
    if whole is None:
        return Shown(f"{value:.2f}{unit}", value)
    return Shown(f"{100 * value / whole:.1f}{unit}", 100 * value / whole) if whole else None


def memory_table(contents: RunContents) -> Iterator[Table]:
    """What each worker held when the run ended, in GiB; none where nothing was measured."""
    rows = [
        [name, worker.device, *(_gib(getattr(worker, part)) for part in _PARTS)]
        for name, arm in contents.summaries.items()
        if arm.memory is not None
        for worker in arm.memory.workers
    ]
    head = [Column(title, digits=3) for title in ("arm", "device", *_PARTS.values())]
    notes = [
        "Held: given out by torch's allocator, on a CPU the resident memory of the process. The "
        "residual is what is held beside weights, pool and workspaces: code and buffers, less "
        "pages that were never touched."
    ]
    if rows:
        yield Table("Memory of workers at the end, GiB", head, rows, notes)


def _gib(count: int | None) -> float | None:
    return None if count is None else count / 2**30


def comparison_table(
    comparison: RunComparison, title: str, sides: tuple[str, str] = ("before", "after")
) -> Table:
    """A row for each arm and metric: change, interval, p, n, and whether too much is lost.

    `sides` are the names of what is compared with what.
    """
    head = (
        *("arm", "metric", *sides, "change", "95 % interval", "p", "n", "better/same/worse"),
        *("drop at most", f"drop below {comparison.settings.margin or 0.0:g}?"),
    )
    rows = [
        (metric.name, [arm.after, *_compared(row, metric)])
        for arm in comparison.arms
        for row, metric in zip(metric_table(comparison, arm).rows, arm.metrics, strict=True)
    ]
    # All arms of one metric are what is compared by eye.
    names = list(dict.fromkeys(name for name, _ in rows))
    rows.sort(key=lambda row: names.index(row[0]))
    notes = [
        "Drop at most: the bound of the loss of score with 95 % confidence, one-sided; where no "
        "sample changed, what so few samples cannot rule out. Without a "
        "significant change a loss may still be there: the last column says whether it is small, "
        "by that bound alone.",
        *run_notes(comparison),
    ]
    return Table(title, [*map(Column, head)], [row for _, row in rows], notes)


def _compared(row: Sequence[Value], metric: MetricChange) -> list[Value]:
    *_, interval, p, wins = row
    drop = None if metric.change.ratio else drop_at_most(metric)
    return [
        *row[:4],
        (ratio_ends(metric) if metric.change.ratio else "") or interval,
        p,
        metric.change.pairs,
        wins,
        None if drop is None else Shown(f"{drop:.3f}", drop),
        NOTHING if metric.loss is None else _LOSSES[metric.loss],
    ]


def count_table(contents: RunContents) -> Table:
    """Counts in which arms differ from full: exact, over the samples that both answered."""
    rows = [
        [arm.after, counter.name, counter.before, counter.after, counter.samples]
        for arm in contents.compared
        for counter in arm.counters
        if not counter.same
    ]
    head = ("arm", "count", BASELINE, "in the arm", "samples that differ")
    return Table("Exact counts", [Column(title, digits=0) for title in head], rows)


def decisions(contents: RunContents) -> Iterator[str]:
    """What the comparisons say in words, arm by arm, unless too few samples stand for it."""
    for arm in contents.compared:
        assert contents.comparison is not None
        unseen = [(m, share) for m in arm.metrics if (share := unseen_loss(m)) is not None]
        left_out = {line for metric, _ in unseen for line in decision(metric, contents.comparison)}
        notes = [note for note in arm_notes(contents.comparison, arm) if note not in left_out]
        for metric, share in unseen:
            notes.append(
                f"{metric.name}: none differs, but a loss in {share:.0%} of samples may go unseen."
            )
        yield from (f"{arm.after}: {note}" for note in notes)


def provenance_table(contents: RunContents) -> Table:
    """The manifest: what was asked for, on what it ran, and what engines say of themselves."""
    rows = [*_flattened(contents.manifest)]
    return Table("manifest.json", [Column("field"), Column("value")], rows)


def _flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested JSON values as dotted paths and texts; None and what is empty are left out."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{prefix}{key}.")
        elif value not in (None, "", [], ()):
            items = value if isinstance(value, list | tuple) else [value]
            yield f"{prefix}{key}", ", ".join(map(str, items))
