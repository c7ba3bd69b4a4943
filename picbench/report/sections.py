"""The parts of a report: tables whose values have intervals, and the replies that changed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from picbench.compare import comparison as formats
from picbench.compare.comparison import RunComparison
from picbench.report.contents import RunContents, drop_at_most, ratio_ends, ratio_text
from picbench.statistics.intervals import Interval
from picbench.statistics.significance import Loss
from picbench.store.reader import StoredSample
from picbench.store.records import SampleRow
from picbench.store.summary import BASELINE
from picbench.store.writer import WORKLOAD
from picbench.tables.metrics import METRICS, SCORE, metrics_shown
from picbench.tables.run import cache_lines
from picbench.tables.table import NOTHING, Column, Shown, Table, Value

#: Samples that are shown at most, whatever room there is.
SAMPLES = 200

#: Characters that are shown of a reply or question, and of a passage.
_REPLY, _PASSAGE = 2_000, 6_000


def arm_table(contents: RunContents) -> Table:
    """A row for each arm; quantiles with intervals, and none from too few requests."""
    metrics = metrics_shown(contents.summaries.values(), "report")
    ratios = {arm.after: arm.metric("ttft_ms") for arm in contents.compared}
    rows: list[list[Value]] = []
    for name, arm in contents.arms.items():
        row: list[Value] = [name]
        for metric in metrics:
            value, ratio = metric.value(arm.summary), ratios.get(name)
            if metric.quantile is not None:
                found = arm.ttft_at(metric.quantile)
                few = found.value is None and found.count
                known = with_interval(found.value, found.interval, "{:,.1f}")
                row.append(f"n < {found.needed}" if few else known)
            elif metric.over_full:
                row.append(Shown(ratio_text(ratio), ratio.change.value) if ratio else None)
            elif metric.name == SCORE:
                row.append(with_interval(value, arm.score_interval(), "{:.3f}"))
            elif metric.unit == "req/s":
                row.append(with_interval(value, None, "{:.2f}"))
            else:
                shown = metric.text(arm.summary)
                row.append(None if shown is None else Shown(shown, value))
        rows.append(row)
    repeats = max(arm.ttft_at(0.5).repeats for arm in contents.arms.values())
    cache = cache_lines(contents.manifest["config"].get("cache"), contents.summaries)
    lines = [line.replace("`", "") for line in cache]
    notes = [
        f"{contents.metric}: mean, unparsed replies as 0, with 95 % over sets of documents.",
        f"TTFT: milliseconds, with 95 % from {formats.quantile_method(repeats)}; p90 needs 10 "
        "requests, p99 100.",
        *(lines or [f"Cache: {contents.manifest['cache']}."]),
    ]
    head = [Column("arm"), *(Column(metric.title.removesuffix(" %")) for metric in metrics)]
    return Table("Arms", head, rows, notes)


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
    titles = (METRICS[name].title for name in ("ttft_p50_ms", "ttft_vs_full"))
    head = ["arm", "from request", "requests", *titles, "a cache without limits has", "found"]
    rows: list[list[Value]] = []
    for name, arm in contents.summaries.items():
        for window in arm.cache.decay if arm.cache is not None else ():
            p50 = None if window.ttft_ms is None else window.ttft_ms.p50
            ratio = None if window.ttft_vs_full is None else window.ttft_vs_full.geomean
            shares = (
                100 * tokens / window.prompt_tokens if window.prompt_tokens else None
                for tokens in (window.expected_tokens, window.found_tokens)
            )
            found = (with_interval(share, None, "{:.1f} %") for share in shares)
            vs_full = with_interval(ratio, None, "{:.2f}x")
            rows.append([name, window.first, window.requests, p50, vs_full, *found])
    notes = ["Shares of prompts' tokens. What is there and not found was evicted."]
    if rows:
        yield Table("Decay over a steady stream", [*map(Column, head)], rows, notes)


def memory_table(contents: RunContents) -> Iterator[Table]:
    """What each worker held when the run ended, in GiB; none where nothing was measured."""
    rows: list[list[Value]] = []
    for name, arm in contents.summaries.items():
        for worker in arm.memory.workers if arm.memory is not None else ():
            tensors = (worker.weights_bytes, worker.pool_bytes, worker.workspace_bytes)
            whole = (worker.residual_bytes, worker.held_bytes, worker.driver_bytes)
            gib = (None if count is None else count / 2**30 for count in (*tensors, *whole))
            rows.append([name, worker.device, *gib])
    head = ("arm", "device", "weights", "KV pool", "workspaces", "residual", "held", "driver")
    if rows:
        yield Table("Memory of workers at the end, GiB", [Column(title, 3) for title in head], rows)


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
    # All arms of one metric are what is compared by eye.
    rows: dict[str, list[list[Value]]] = {}
    for arm in comparison.arms:
        shown = formats.metric_table(comparison, arm).rows
        for (*values, interval, p, wins), metric in zip(shown, arm.metrics, strict=True):
            ratio = metric.change.ratio
            ends = (ratio_ends(metric) if ratio else "") or interval
            drop = with_interval(None if ratio else drop_at_most(metric), None, "{:.3f}")
            loss = "undecided" if metric.loss is Loss.UNKNOWN else metric.loss or NOTHING
            loss = "not known" if metric.change.unknown else loss
            row = [arm.after, *values, ends, p, metric.change.pairs, wins, drop, str(loss)]
            rows.setdefault(metric.name, []).append(row)
    notes = [
        "Drop at most: the bound of the loss of score on other documents with 95 % confidence, "
        "one-sided; where no sample changed, what so few samples cannot rule out. Without a "
        "significant change a loss may still be there: the last column says whether it is small, "
        "by that bound alone.",
        *formats.run_notes(comparison),
    ]
    return Table(title, [*map(Column, head)], [*chain(*rows.values())], notes)


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
    """What the comparisons say in words, arm by arm."""
    for arm in contents.compared:
        assert contents.comparison is not None
        for note in formats.arm_notes(contents.comparison, arm):
            yield f"{arm.after}: {note}"


def flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested JSON values as dotted paths and texts; None and what is empty are left out."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{key}.")
        elif value not in (None, "", [], ()):
            items = value if isinstance(value, list | tuple) else [value]
            yield f"{prefix}{key}", ", ".join(map(str, items))


@dataclass(frozen=True, slots=True)
class BrowsedSample:
    """A sample: its question (None where the run did not keep it), right answers, replies by arm.

    `passages` are texts by the id of their chunk, `flipped` the arms whose score differs from
    full's, `change` the largest differences in words.
    """

    sample: str
    question: str | None
    answers: Sequence[str]
    replies: Table
    passages: Mapping[str, str]
    flipped: Sequence[str]
    change: str


@dataclass(frozen=True, slots=True)
class AnswerBrowser:
    """The samples whose score changed most; `total` samples changed, `arms` are those to choose."""

    samples: Sequence[BrowsedSample]
    total: int
    arms: Sequence[str]
    notes: Sequence[str]


def browse_answers(contents: RunContents, room: int) -> AnswerBrowser | None:
    """The flipped samples in about `room` characters; None where nothing was compared."""
    if contents.comparison is None:
        return None
    changes: dict[str, dict[str, float]] = {}
    for arm in contents.compared:
        for flip in arm.flips:
            change = (flip.after or 0.0) - (flip.before or 0.0)
            changes.setdefault(flip.sample, {})[arm.after] = change
    order = sorted(changes, key=lambda name: -max(map(abs, changes[name].values())))
    replies: dict[str, dict[str, SampleRow]] = {name: {} for name in order[:SAMPLES]}
    for arm_name, facts in contents.arms.items():
        answered = (row for row in facts.rows if row.error is None)
        for name, row in zip(facts.measured.samples, answered, strict=True):
            if name in replies:
                replies[name][arm_name] = row
    asked = {name: next(iter(rows.values())).sample for name, rows in replies.items()}
    kept = WORKLOAD not in contents.missing
    sent = contents.run.workload if kept else {}
    samples, seen = list[BrowsedSample](), set[str]()
    for name, rows in replies.items():
        found = _browsed(name, sent.get(asked[name]), rows, changes[name], contents.metric)
        texts = [text for row in found.replies.texts() for text in row]
        new = [text for key, text in found.passages.items() if key not in seen]
        # With the tags around: a cell, a reference to a passage, the whole sample.
        tags = 30 * len(texts) + 70 * len(found.passages) + 1000
        room -= tags + sum(map(len, (*texts, *new, found.question or "")))
        if room < 0 and samples:
            break
        samples.append(found)
        seen |= found.passages.keys()
    notes = []
    if len(samples) < len(order):
        notes.append(
            f"The {len(samples):,} of {len(order):,} that changed most; picbench compare "
            f"{contents.run.path} --format json lists all."
        )
    if not kept:
        notes.append("The run did not keep what it sent: questions and passages are not known.")
    arms = [arm.after for arm in contents.compared if arm.flips]
    return AnswerBrowser(samples, len(order), arms, notes)


def _browsed(
    name: str,
    stored: StoredSample | None,
    rows: Mapping[str, SampleRow],
    changes: Mapping[str, float],
    metric: str,
) -> BrowsedSample:
    head = [Column("arm"), Column("reply"), Column(metric, 3), Column("outcome")]
    head += [METRICS["ttft_ms"].column]
    head += [Column(title, 0) for title in ("reused", "linked", "compiled", "chunk blocks")]
    replies: list[list[Value]] = []
    for arm in sorted(rows, key=lambda arm: (arm != BASELINE, arm not in changes)):
        row, tokens, text = rows[arm], rows[arm].tokens, _cut(rows[arm].text or "", _REPLY)
        counts = (tokens.reused, tokens.linked, tokens.compiled, row.hits.chunk)
        replies.append([arm, text, row.score, str(row.outcome), row.ttft_ms, *counts])
    question, passages = None, dict[str, str]()
    for segment in stored.segments if stored is not None else ():
        text = segment.text if segment.text is not None else f"({segment.tokens} tokens, no text)"
        if segment.chunk is not None:
            passages[str(segment.chunk)] = _cut(text, _PASSAGE)
        else:  # The prompt's last text is what is asked.
            question = _cut(text, _REPLY)
    answers = () if stored is None else stored.answers
    largest = sorted(changes, key=lambda arm: -abs(changes[arm]))[:3]
    change = ", ".join(f"{arm} {changes[arm]:+.2f}" for arm in largest)
    table = Table("", head, replies)
    return BrowsedSample(name, question, answers, table, passages, [*changes], change)


def _cut(value: str, length: int) -> str:
    value = value.strip()
    more = len(value) - length
    return value if more <= 0 else f"{value[:length]} ... ({more:,} more characters)"
