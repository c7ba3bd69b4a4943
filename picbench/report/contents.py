"""What a report says of a run, as far as the run got: its arms, a verdict, reasons to doubt it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from picbench.compare import arm as columns
from picbench.compare.arm import ArmComparison, MeasuredArm, MetricChange
from picbench.compare.comparison import (
    RunComparison,
    adjusted,
    compare_in_run,
    drift_words,
    on_others,
    on_these,
)
from picbench.engines.algorithms import Registry, Reuse
from picbench.errors import ConfigError, IncomparableRuns
from picbench.run.result import delay_lines
from picbench.settings import ComparisonSettings
from picbench.statistics import intervals
from picbench.statistics.significance import SURE, Loss
from picbench.store.reader import Run, check_rows
from picbench.store.records import SampleRow, Tally
from picbench.store.summary import BASELINE, MARKS, ArmSummary, summarise
from picbench.store.writer import FINAL, MEMORY, SAMPLES, SUMMARY, WORKLOAD
from picbench.tables.run import stalled, subject_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ArmFacts:
    """One arm: its rows in the order of the run, its summary, its answered requests in columns."""

    rows: Sequence[SampleRow]
    summary: ArmSummary
    measured: MeasuredArm

    @property
    def timed(self) -> int:
        """How many requests have a time to the first token."""
        return sum(time is not None for time in self.measured.times["ttft_ms"])

    def ttft_at(self, q: float) -> intervals.Quantile:
        """A quantile of TTFT in ms with its interval; without a value from too few requests."""
        return columns.quantile_of(self.measured, "ttft_ms", q)

    def score_interval(self) -> intervals.Interval | None:
        """95 % for the mean score, unparsed as 0, over sets of documents; None of a single set."""
        answered = [row for row in self.rows if row.error is None]
        known = [(0.0 if r.outcome == "unparsed" else r.score, r) for r in answered]
        scores = [(score, r.cluster or r.sample) for score, r in known if score is not None]
        if not scores:
            return None
        values, clusters = zip(*scores, strict=True)
        sums = intervals.sum_clusters(np.asarray(values, dtype=np.float64), clusters)
        return intervals.BoundedMean(sums, 0.0, 1.0).interval()


@dataclass(frozen=True, slots=True)
class RunContents:
    """A run as far as it got; `missing` names the files that it does not have.

    `comparison` has every other arm against `full`, and is None where there is nothing to compare;
    `notes` say why, and what else to know of it.
    """

    run: Run
    arms: Mapping[str, ArmFacts]
    comparison: RunComparison | None
    missing: Sequence[str]
    notes: Sequence[str]

    @property
    def name(self) -> str:
        """That of the run directory."""
        return self.run.path.resolve().name

    @property
    def manifest(self) -> Mapping[str, Any]:
        """The manifest as JSON values."""
        return self.run.manifest

    @property
    def summaries(self) -> dict[str, ArmSummary]:
        """The summaries of the arms."""
        return {name: arm.summary for name, arm in self.arms.items()}

    @property
    def compared(self) -> Sequence[ArmComparison]:
        """The other arms against full; none where nothing is compared."""
        return () if self.comparison is None else self.comparison.arms

    @property
    def metric(self) -> str:
        """How replies are scored."""
        scored = (arm.score.metric for arm in self.summaries.values())
        return next(scored, str(self.manifest["workload"]["metric"] or "score"))

    @property
    def meaningful(self) -> bool:
        """Whether scores mean anything: not with random weights."""
        return bool(self.manifest["model"]["meaningful"])

    @property
    def labels(self) -> list[str]:
        """What has to stand beside every number of this run."""
        weights, status = self.manifest["model"]["weights"], self.manifest["status"]
        arms = self.summaries.items()
        return [
            *([] if self.meaningful else [f"{weights} weights: scores mean nothing"]),
            *(["synthetic rows"] if self.manifest["workload"]["synthetic"] else []),
            *(f"{name}: {mark}" for name, arm in arms for mark in arm.marks),
            *([] if status == "complete" else [f"{status} run"]),
        ]


def read_contents(run: Run, margin: float) -> RunContents:
    """Everything that is there; `margin` is the loss of score to judge.

    Raises ConfigError for files that are there and cannot be read, InvalidRun for a file of rows
    that lacks some which a run that ended has measured.
    """
    rows: dict[str, list[SampleRow]] = {}
    for row in _read_if_there(lambda: run.rows, run.path / SAMPLES) or ():
        rows.setdefault(row.arm, []).append(row)
    summary = _read_if_there(lambda: run.summary, run.path / SUMMARY)
    if summary and run.manifest["status"] in FINAL and (run.path / SAMPLES).exists():
        check_rows(run)
    known = {
        SAMPLES: rows,
        SUMMARY: summary,
        MEMORY: _has_ledger(run),
        WORKLOAD: (run.path / WORKLOAD).exists(),
    }
    # Rows alone, of a run that ended early, say no throughput and no blocks.
    summaries = summary or summarise(
        {name: Tally(rows=found) for name, found in rows.items()},
        metric=run.manifest["workload"]["metric"] or "score",
        meaningful=run.manifest["model"]["meaningful"],
    )
    sent_in = columns.documents_of(run) if rows else {}
    arms = {
        name: ArmFacts(own, summaries[name], columns.arm_of(name, own, summaries[name], sent_in))
        for name, own in rows.items()
    }
    comparison, notes = None, ["nothing is compared before the run has a summary"]
    if rows and summary:
        comparison, notes = _compare_with_full(run, arms, ComparisonSettings(margin=margin))
    missing = [name for name, content in known.items() if not content]
    return RunContents(run, arms, comparison, missing, notes)


def _has_ledger(run: Run) -> bool:
    """Whether a run has the block ledger, with steps in it as far as can be read here."""
    try:
        ledger = _read_if_there(lambda: run.ledger, run.path / MEMORY)
    except ModuleNotFoundError:
        return (run.path / MEMORY).exists()
    return ledger is not None and len(ledger) > 0


def _read_if_there(read: Callable[[], T], file: Path) -> T | None:
    """What `read` gives; None where a run ended before it wrote the file."""
    try:
        return read()
    except ConfigError:
        if file.exists():
            raise
        return None


def _compare_with_full(
    run: Run, arms: Mapping[str, ArmFacts], settings: ComparisonSettings
) -> tuple[RunComparison | None, list[str]]:
    """Every other arm against full, as far as both answered anything, and what is not so."""
    if BASELINE not in arms:
        return None, [f"no arm {BASELINE} to compare with"]
    if len(arms) == 1:
        return None, [f"{BASELINE} is the only arm: nothing is compared"]
    found, notes = list[ArmComparison](), list[str]()
    for name, arm in arms.items():
        try:
            if name != BASELINE:
                full = arms[BASELINE].measured
                one = compare_in_run(full, arm.measured, settings, notes)
                if not one.pairs:
                    raise IncomparableRuns(f"{BASELINE} and it have no answered sample in common")
                found.append(one)
        except IncomparableRuns as error:
            notes.append(f"{name}: {error.message}")
    if not found:
        return None, notes
    score, path = next(iter(run.summary.values())).score, str(run.path)
    told = (score.metric, score.meaningful, settings, adjusted(found))
    return RunComparison(path, path, *told), notes


def drop_at_most(metric: MetricChange) -> float | None:
    """The bound of the loss of a score from 0 to 1 on other documents, with 95 % confidence."""
    bounds = metric.change.one_sided
    return None if bounds is None else max(0.0, -bounds.low)


def ratio_ends(metric: MetricChange) -> str:
    """The ends of an interval of ratios, and what of drift is in it; nothing without an interval.

    Digits far from 1, from too few rounds, say nothing.
    """
    interval = metric.change.interval
    if interval is None:
        return ""
    low = "below 0.01" if interval.low < 0.01 else f"{interval.low:.2f}"
    high = "above 100" if interval.high > 100 else f"{interval.high:.2f}"
    return f"{low} to {high}{drift_words(metric)}"


def ratio_text(metric: MetricChange, unit: str = "x") -> str:
    """A ratio, with the ends of its interval in brackets where there are any."""
    ends = ratio_ends(metric)
    return f"{metric.change.value:.2f}{unit}{f' ({ends})' if ends else ''}"


class Headline(NamedTuple):
    """The verdict on a run in words, in detail against the margin, and how the page colours it."""

    text: str
    detail: str
    tone: Literal["good", "bad", "open"] = "open"


def headline(contents: RunContents) -> Headline:
    """What the run's main arm gains and loses against full, or why that cannot be said."""
    if contents.manifest["status"] == "invalid":
        return Headline("Invalid run", f"{contents.manifest['reason'] or 'no reason given'}", "bad")
    name = subject_of([name for name in contents.arms if _reuses(contents, name)])
    arm = next((arm for arm in contents.compared if arm.after == name), None)
    if contents.comparison is None or arm is None:
        detail = contents.notes[0] if contents.notes else f"no arm reuses chunks beside {BASELINE}"
        return Headline("No comparison", detail)
    # Over all samples where some replies are unparsed: leaving these out flatters an arm.
    score = arm.metric(columns.SCORE_OF_ALL) or arm.metric(columns.SCORE)
    ttft, peaks, gains = arm.metric("ttft_ms"), arm.counter("peak_blocks"), list[str]()
    if ttft is not None:
        gains.append(f"first token in {ratio_text(ttft, 'x the time')}")
    if peaks is not None and peaks.before:
        gains.append(f"{peaks.after / peaks.before:.2f}x the blocks at peak")
    if score is not None and contents.meaningful:
        found, words = score.change.interval, f"{contents.metric} {score.change.value:+.2f}"
        gains.append(words if found is None else f"{words} ({found.low:+.2f} to {found.high:+.2f})")
    text = f"{arm.after} against {BASELINE}: {', '.join(gains)} (n={arm.pairs})"
    margin = contents.comparison.settings.margin
    if not contents.meaningful or score is None or margin is None:
        return Headline(text, "Scores mean nothing here.")
    if score.before == 0:
        return Headline(text, f"{BASELINE} scores 0 on all of them, so there is no score to lose.")
    change = score.change
    lost = change.value < -margin and change.p is not None and change.p < SURE
    detail = f"{on_these(score)}. On other documents: {on_others(score, margin)}."
    if lost or score.loss is Loss.BEYOND:
        return Headline(text, detail, "bad")
    return Headline(text, detail, "good" if score.loss is Loss.WITHIN else "open")


def _reuses(contents: RunContents, arm: str) -> bool:
    """Whether an arm reuses chunks; one whose algorithm is not installed here counts as such."""
    try:
        spec = contents.manifest["arms"][arm]["algorithm"]
        return Registry().parse(spec).reuse is Reuse.CHUNKS
    except (ConfigError, KeyError):
        return arm != BASELINE


def cautions(contents: RunContents) -> Iterator[str]:
    """Reasons to doubt the numbers, the gravest first; none for a run with nothing against it."""
    manifest, summaries = contents.manifest, contents.summaries
    status, workload, attempts = manifest["status"], manifest["workload"], manifest["attempts"]
    because = f": {manifest['reason']}" if manifest["reason"] else ""
    if status == "invalid":
        yield f"The run is invalid{because}. Its numbers mean nothing."
    elif status == "partial":
        yield f"Requests failed{because}; means are over those that were answered."
    elif status != "complete":
        yield f"The run is {status}{because}; this is what it has so far."
    for name in contents.missing:
        yield f"The run has no {name}; what is read from it is left out."
    if not contents.meaningful:
        weights = manifest["model"]["weights"]
        yield f"The model has {weights} weights: scores and replies mean nothing."
    if workload["synthetic"]:
        yield "The rows are synthetic, not the data set's own."
    if manifest["config"].get("drop"):
        yield "Prompts lack passages on purpose: full does not know them either."
    if skipped := workload["skipped_rows"]:
        yield f"{skipped} malformed rows were left out, the first: {workload['first_skipped']}."
    if workload["truncated"]:
        yield f"{workload['truncated']} prompts were cut to fit the context."
    for name, arm in contents.arms.items():
        failed = [row.error for row in arm.rows if row.error is not None]
        if failed:
            count = f"{len(failed)} of {len(arm.rows)} requests"
            yield f"{name}: {count} failed, the first: {failed[0]}"
        if untimed := sum(row.error is None and not row.timed for row in arm.rows):
            yield f"{name}: {untimed} requests were answered but not timed."
        if unparsed := arm.summary.outcomes.get("unparsed"):
            yield f"{name}: nothing to score in {unparsed} replies, which count as 0."
    for name, summary in summaries.items():
        yield from (f"{name} is {mark}: {MARKS[mark]}." for mark in summary.marks)
    for line in (*stalled(summaries), *delay_lines(summaries)):
        yield line.replace("`", "")
    for name, document in manifest["arms"].items():
        yield from (f"{name}: {note}" for note in document["engine"].get("notes", ()))
    yield from contents.notes
    if not contents.arms:
        yield "No request was answered."
    else:
        fewest = min(arm.timed for arm in contents.arms.values())
        if fewest < 30:
            yield f"Only {fewest} timed requests an arm: intervals are wide."
        if fewest < (needed := intervals.values_needed(0.99)):
            yield f"p99 is not given: it needs {needed} timed requests, an arm has {fewest}."
    if (manifest["provenance"].get("git") or {}).get("dirty"):
        yield "The code had changes that are in no commit."
    if len(attempts) > 1:
        changed = sum(attempt["changed_outputs"] for attempt in attempts)
        again = f"; {changed} replies were other ones when served again" if changed else ""
        yield f"The run was continued {len(attempts) - 1} times{again}."
