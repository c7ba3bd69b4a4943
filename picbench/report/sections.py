"""Tables as the page shows them: a text and a sort key for each cell."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from picbench.compare.arm import ArmComparison, MetricChange
from picbench.compare.comparison import RunComparison
from picbench.compare.formats import (
    arm_notes,
    decision,
    drift_words,
    metric_table,
    quantile_method,
    run_notes,
)
from picbench.compare.intervals import Interval
from picbench.compare.significance import Loss
from picbench.report.contents import ArmFacts, RunContents, drop_at_most, unseen_loss
from picbench.store.summary import BASELINE
from picbench.tables.run import cache_lines

NOTHING = "-"

#: Ends of intervals of ratios are not told below this, nor above its inverse.
LEAST = 0.01


@dataclass(frozen=True, slots=True)
class HtmlCell:
    """What is shown, and the number to sort by; None sorts by the text, or last among numbers."""

    text: str
    key: float | None = None


@dataclass(frozen=True, slots=True)
class HtmlTable:
    """A table that can be sorted by any column; the first column names the row.

    `labels` say what its numbers are not, such as measured on real rows.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[HtmlCell]]
    notes: Sequence[str] = ()
    labels: Sequence[str] = ()

    @property
    def numeric(self) -> list[bool]:
        """Which columns have numbers, and are aligned to the right."""
        return [
            any(row[column].key is not None for row in self.rows)
            for column in range(len(self.head))
        ]


def text(value: str) -> HtmlCell:
    """A cell without a number."""
    return HtmlCell(value)


def number(value: float | None, pattern: str = "{:,.1f}") -> HtmlCell:
    """A cell with a number, or with none."""
    return HtmlCell(NOTHING) if value is None else HtmlCell(pattern.format(value), float(value))


def share(count: float | None, whole: float) -> HtmlCell:
    """A count in percent of the whole."""
    return number(100 * count / whole if whole and count is not None else None, "{:.1f} %")


def with_interval(value: float | None, interval: Interval | None, pattern: str) -> HtmlCell:
    """A number with the interval of 95 % after it, where there is one."""
    cell = number(value, pattern)
    if value is None or interval is None:
        return cell
    ends = f"{pattern.format(interval.low)} to {pattern.format(interval.high)}"
    return HtmlCell(f"{cell.text} ({ends})", cell.key)


def with_ratio_interval(
    value: float | None, interval: Interval | None, words: str = ""
) -> HtmlCell:
    """A ratio of times with its interval, as `ratio_ends` writes it, and what to know of that."""
    cell = number(value, "{:.2f}x")
    if value is None or interval is None:
        return cell
    return HtmlCell(f"{cell.text} ({ratio_ends(interval)}{words})", cell.key)


def ratio_ends(interval: Interval) -> str:
    """The ends of an interval of ratios; digits far from 1, from too few rounds, say nothing."""
    low = "below 0.01" if interval.low < LEAST else f"{interval.low:.2f}"
    high = "above 100" if interval.high > 1 / LEAST else f"{interval.high:.2f}"
    return f"{low} to {high}"


def flattened(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested JSON values as dotted paths and texts; None and what is empty are left out."""
    found: list[tuple[str, str]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found += flattened(value, f"{name}.")
        elif value not in (None, "", [], ()):
            items = value if isinstance(value, list | tuple) else [value]
            found.append((name, ", ".join(map(str, items))))
    return found


_Columns = Mapping[str, Callable[[ArmFacts], HtmlCell]]

#: What is said of a loss against the margin.
LOSSES = {Loss.WITHIN: "within", Loss.BEYOND: "beyond", Loss.UNKNOWN: "undecided"}

#: Of a worker's memory, in the order of the table.
_PARTS = (
    *("weights_bytes", "pool_bytes", "workspace_bytes"),
    *("residual_bytes", "held_bytes", "driver_bytes"),
)


def arm_table(contents: RunContents) -> HtmlTable:
    """A row for each arm; quantiles with intervals, and none from too few requests."""
    ratios = {arm.after: arm.metric("ttft_ms") for arm in _compared(contents)}
    columns = _columns(contents, ratios)
    rows = [
        [text(name), *(column(arm) for column in columns.values())]
        for name, arm in contents.arms.items()
    ]
    notes = [
        f"{contents.metric}: mean, unparsed replies as 0, with 95 % over sets of documents.",
        f"TTFT: milliseconds, with 95 % from {quantile_method(_repeats(contents))}; p90 needs 10 "
        "requests, p99 100.",
        "Blocks: most that running requests held at a time. Reused and computed: shares of the "
        "prompts; computed includes chunks that were compiled to be reused.",
    ]
    return HtmlTable("Arms", ["arm", *columns], rows, [*notes, *_cache(contents)], contents.labels)


def _repeats(contents: RunContents) -> int:
    """Of the arm that got farthest."""
    return max(arm.ttft_at(0.5).repeats for arm in contents.arms.values())


def _cache(contents: RunContents) -> list[str]:
    """The state of caches, as it was declared or as it came about."""
    summaries = {name: arm.summary for name, arm in contents.arms.items()}
    lines = cache_lines(contents.manifest["config"].get("cache"), summaries)
    found = [line.replace("`", "") for line in lines]
    return found or [f"Cache: {contents.manifest['cache']}."]


def decay_table(contents: RunContents) -> HtmlTable | None:
    """What caches gave over a steady stream, a row for each window; None of other runs."""
    rows = [
        [
            text(name),
            number(window.first, "{:,}"),
            number(window.requests, "{:,}"),
            number(None if window.ttft_ms is None else window.ttft_ms.p50),
            number(None if window.ttft_vs_full is None else window.ttft_vs_full.geomean, "{:.2f}x"),
            share(window.expected_tokens, window.prompt_tokens),
            share(window.found_tokens, window.prompt_tokens),
        ]
        for name, arm in contents.arms.items()
        if arm.summary.cache is not None
        for window in arm.summary.cache.decay
    ]
    if not rows:
        return None
    head = (
        *("arm", "from request", "requests", "TTFT p50 ms", f"TTFT vs {BASELINE}"),
        *("a cache without limits has", "found"),
    )
    notes = ["Shares of prompts' tokens. What is there and not found was evicted."]
    return HtmlTable("Decay over a steady stream", head, rows, notes, contents.labels)


def _columns(contents: RunContents, ratios: Mapping[str, MetricChange | None]) -> _Columns:
    arms = contents.arms.values()
    found: dict[str, Callable[[ArmFacts], HtmlCell]] = {
        "requests": lambda arm: number(arm.summary.requests, "{:,}"),
        "failed": lambda arm: number(arm.summary.failed, "{:,}"),
        contents.metric: lambda arm: with_interval(
            arm.summary.score.mean, arm.score_interval, "{:.3f}"
        ),
        "TTFT p50": lambda arm: _quantile(arm, 0.5),
        "TTFT p90": lambda arm: _quantile(arm, 0.9),
        "TTFT p99": lambda arm: _quantile(arm, 0.99),
        f"TTFT vs {BASELINE}": lambda arm: _change(ratios.get(arm.name)),
        "TPOT ms": lambda arm: number(arm.summary.tpot_ms),
        "tokens/s": lambda arm: number(arm.summary.throughput_tok_s, "{:,.0f}"),
        "blocks peak": lambda arm: number(arm.summary.blocks.peak_referenced or None, "{:,.0f}"),
        "KV peak GiB": lambda arm: number(_peak_gib(arm), "{:,.3f}"),
        "% of pool": lambda arm: share(arm.summary.blocks.peak_referenced, arm.summary.blocks.pool),
        "reused": lambda arm: share(arm.summary.reused_share, 1),
        "computed": lambda arm: share(arm.summary.computed_tokens, arm.summary.tokens.prompt),
    }
    if not any(map(_peak_gib, arms)):
        del found["KV peak GiB"]
    for outcome in ("abstained", "unparsed"):
        if any(arm.summary.outcomes.get(outcome) for arm in arms):
            found[outcome] = _outcome(outcome)
    if any(arm.summary.makespan_s is not None for arm in arms):
        found["makespan s"] = lambda arm: number(arm.summary.makespan_s)
    if any(arm.summary.goodput_req_s is not None for arm in arms):
        found["goodput req/s"] = lambda arm: number(arm.summary.goodput_req_s, "{:.2f}")
    return found


def _peak_gib(arm: ArmFacts) -> float | None:
    memory = arm.summary.memory
    peak = None if memory is None else memory.peak_referenced_bytes
    return None if peak is None else peak / 2**30


def _outcome(outcome: str) -> Callable[[ArmFacts], HtmlCell]:
    return lambda arm: number(arm.summary.outcomes.get(outcome, 0), "{:,}")


def _quantile(arm: ArmFacts, q: float) -> HtmlCell:
    found = arm.ttft_at(q)
    if found.value is None and found.count:
        return HtmlCell(f"n < {found.needed}")
    return with_interval(found.value, found.interval, "{:,.1f}")


def _change(metric: MetricChange | None) -> HtmlCell:
    if metric is None:
        return text(NOTHING)
    return with_ratio_interval(metric.change.value, metric.change.interval, drift_words(metric))


def memory_table(contents: RunContents) -> HtmlTable | None:
    """What each worker held when the run ended, in GiB; None where nothing was measured."""
    workers = [
        (name, worker)
        for name, arm in contents.arms.items()
        if arm.summary.memory is not None
        for worker in arm.summary.memory.workers
    ]
    if not workers:
        return None
    head = ("arm", "device", "weights", "KV pool", "workspaces", "residual", "held", "driver")
    rows = [
        [text(name), text(worker.device), *(_gib(getattr(worker, part)) for part in _PARTS)]
        for name, worker in workers
    ]
    notes = [
        "Held: given out by torch's allocator, on a CPU the resident memory of the process. The "
        "residual is what is held beside weights, pool and workspaces: code and buffers, less "
        "pages that were never touched."
    ]
    return HtmlTable("Memory of workers at the end, GiB", head, rows, notes, contents.labels)


def _gib(count: int | None) -> HtmlCell:
    return number(None if count is None else count / 2**30, "{:,.3f}")


def comparison_table(
    comparison: RunComparison,
    title: str,
    labels: Sequence[str],
    sides: tuple[str, str] = ("before", "after"),
) -> HtmlTable:
    """A row for each arm and metric: change, interval, p, n, and whether too much is lost.

    `sides` are the names of what is compared with what.
    """
    margin = comparison.settings.margin or 0.0
    head = (
        "arm",
        "metric",
        *sides,
        "change",
        "95 % interval",
        "p",
        "n",
        "better/same/worse",
        "drop at most",
        f"drop below {margin:g}?",
    )
    cells = [
        (metric.name, [text(arm.after), *_metric_cells(row, metric)])
        for arm in comparison.arms
        for row, metric in zip(metric_table(comparison, arm).rows, arm.metrics, strict=True)
    ]
    # All arms of one metric are what is compared by eye.
    names = list(dict.fromkeys(name for name, _ in cells))
    rows = [row for _, row in sorted(cells, key=lambda cell: names.index(cell[0]))]
    notes = [
        "Drop at most: the bound of the loss of score with 95 % confidence, one-sided; where no "
        "sample changed, what so few samples cannot rule out. Without a "
        "significant change a loss may still be there: the last column says whether it is small, "
        "by that bound alone.",
        *run_notes(comparison),
    ]
    return HtmlTable(title, head, rows, notes, labels)


def _metric_cells(row: Sequence[str], metric: MetricChange) -> list[HtmlCell]:
    name, before, after, change, interval, p, wins = row
    drop = None if metric.change.ratio else drop_at_most(metric)
    return [
        text(name),
        HtmlCell(before, metric.before),
        HtmlCell(after, metric.after),
        HtmlCell(change, metric.change.value),
        text(_ends(metric, interval)),
        HtmlCell(p, metric.p),
        number(metric.change.pairs, "{:,}"),
        HtmlCell(wins, metric.wins - metric.losses),
        number(drop, "{:.3f}"),
        text(NOTHING if metric.loss is None else LOSSES[metric.loss]),
    ]


def _ends(metric: MetricChange, interval: str) -> str:
    found = metric.change.interval
    if not metric.change.ratio or found is None:
        return interval
    return f"{ratio_ends(found)}{drift_words(metric)}"


def count_table(contents: RunContents) -> HtmlTable | None:
    """Counts in which arms differ from full: exact, over the samples that both answered."""
    rows = []
    for arm in _compared(contents):
        for counter in arm.counters:
            if not counter.same:
                rows.append(
                    [
                        text(arm.after),
                        text(counter.name),
                        number(counter.before, "{:,.0f}"),
                        number(counter.after, "{:,.0f}"),
                        number(counter.samples, "{:,}"),
                    ]
                )
    if not rows:
        return None
    head = ("arm", "count", BASELINE, "in the arm", "samples that differ")
    return HtmlTable("Exact counts", head, rows, (), contents.labels)


def decisions(contents: RunContents) -> list[str]:
    """What the comparisons say in words, arm by arm, unless too few samples stand for it."""
    comparison = contents.comparison
    if comparison is None:
        return []
    found = []
    for arm in comparison.arms:
        unseen = [(m, share) for m in arm.metrics if (share := unseen_loss(m)) is not None]
        left_out = {line for metric, _ in unseen for line in decision(metric, comparison)}
        notes = [note for note in arm_notes(comparison, arm) if note not in left_out]
        notes += [
            f"{metric.name}: none differs, but a loss in {share:.0%} of samples may go unseen."
            for metric, share in unseen
        ]
        found += [f"{arm.after}: {note}" for note in notes]
    return found


def provenance_table(contents: RunContents) -> HtmlTable:
    """The manifest: what was asked for, on what it ran, and what engines say of themselves."""
    rows = [[text(key), text(value)] for key, value in flattened(contents.manifest)]
    return HtmlTable("manifest.json", ("field", "value"), rows)


def _compared(contents: RunContents) -> Sequence[ArmComparison]:
    return () if contents.comparison is None else contents.comparison.arms


def element(name: str, *children: str, **attributes: str | float | None) -> Markup:
    """An element; children that are not `Markup` are escaped, attributes that are None left out.

    ``class_`` is the attribute class, ``stroke_width`` is stroke-width; numbers have two digits
    after the point at most.
    """
    given = (
        f'{key.rstrip("_").replace("_", "-")}="{escape(_text(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = Markup("").join(children)
    return Markup(f"<{' '.join([name, *given])}>{inner}</{name}>")


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
