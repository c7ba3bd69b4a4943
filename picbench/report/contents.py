"""What a report needs of a run, as far as the run got."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from picbench.compare.arm import ArmComparison, MeasuredArm, MetricChange, measured_arms, placed
from picbench.compare.comparison import ComparisonSettings, RunComparison, adjusted, compare_in_run
from picbench.compare.intervals import (
    Interval,
    Quantile,
    StudentMean,
    repeated_quantile,
    sum_clusters,
)
from picbench.compare.significance import Loss, loss_bounds, unseen_share
from picbench.engines.algorithms import Registry, Reuse
from picbench.errors import ConfigError, IncomparableRuns
from picbench.store.manifest import FINAL
from picbench.store.reader import Run, Series, check_rows
from picbench.store.records import SampleRow, Tally
from picbench.store.summary import BASELINE, ArmSummary, summarise
from picbench.store.writer import MEMORY, SAMPLES, SUMMARY, WORKLOAD, StoredSample

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ArmFacts:
    """One arm: its rows in the order of the run, its summary, and its timed TTFTs in ms.

    These are of requests at `places` in their `repeats`, as in a `MeasuredArm`. `score_interval` is
    that of the mean score; None where scores say nothing of their spread.
    """

    name: str
    rows: Sequence[SampleRow]
    summary: ArmSummary
    ttft: Sequence[float]
    places: Sequence[int]
    repeats: Sequence[int]
    score_interval: Interval | None

    def ttft_at(self, q: float) -> Quantile:
        """A quantile of TTFT in ms with its interval; without a value from too few requests."""
        return repeated_quantile(self.ttft, q, self.places, self.repeats)


@dataclass(frozen=True, slots=True)
class RunContents:
    """A run as far as it got; `missing` names the files that it does not have.

    `comparison` has every other arm against `full`, and is None where there is nothing to compare;
    `notes` say why, and what else to know of it.
    """

    run: Run
    arms: Mapping[str, ArmFacts]
    ledger: Mapping[str, Series]
    comparison: RunComparison | None
    missing: Sequence[str]
    notes: Sequence[str]

    @property
    def manifest(self) -> Mapping[str, Any]:
        """The manifest as JSON values."""
        return self.run.manifest

    def sent(self, samples: Container[str]) -> Mapping[str, StoredSample]:
        """What was sent for these samples; nothing where the run did not keep it."""
        return {} if WORKLOAD in self.missing else self.run.samples_sent(samples)

    @property
    def metric(self) -> str:
        """How replies are scored."""
        names = [arm.summary.score.metric for arm in self.arms.values()]
        return names[0] if names else str(self.manifest["workload"]["metric"] or "score")

    @property
    def meaningful(self) -> bool:
        """Whether scores mean anything: not with random weights."""
        return bool(self.manifest["model"]["meaningful"])

    @property
    def labels(self) -> list[str]:
        """What has to stand beside every number of this run."""
        found = []
        if not self.meaningful:
            found.append(f"{self.manifest['model']['weights']} weights: scores mean nothing")
        if self.manifest["workload"]["synthetic"]:
            found.append("synthetic rows")
        for name, arm in self.arms.items():
            if arm.summary.provenance == "simulated":
                found.append(f"{name}: simulated")
        if self.manifest["status"] != "complete":
            found.append(f"{self.manifest['status']} run")
        return found

    def reusing(self) -> list[str]:
        """The arms that reuse chunks; an algorithm that is not installed here counts as one."""
        registry = Registry()
        return [name for name in self.arms if self._reuses(name, registry)]

    def _reuses(self, name: str, registry: Registry) -> bool:
        try:
            spec = self.manifest["arms"][name]["algorithm"]
            return registry.parse(spec).reuse is Reuse.CHUNKS
        except (ConfigError, KeyError):
            return name != BASELINE


def read_contents(run: Run, margin: float) -> RunContents:
    """Everything that is there; `margin` is the loss of score to judge.

    Raises ConfigError for files that are there and cannot be read, InvalidRun for a file of rows
    that lacks some which a run that ended has measured.
    """
    found: dict[str, list[SampleRow]] = {}
    for row in _read_if_there(lambda: run.rows, run.path / SAMPLES) or ():
        found.setdefault(row.arm, []).append(row)
    summary = _read_if_there(lambda: run.summary, run.path / SUMMARY)
    if summary and run.manifest["status"] in FINAL and (run.path / SAMPLES).exists():
        check_rows(run)
    ledger = _read_if_there(lambda: run.ledger, run.path / MEMORY) or {}
    known = {SAMPLES: found, SUMMARY: summary, MEMORY: ledger}
    missing = [name for name, content in known.items() if not content]
    if not (run.path / WORKLOAD).exists():
        missing.append(WORKLOAD)
    if found and summary:
        comparison, notes = _compare_with_full(run, margin)
    else:
        comparison, notes = None, ["nothing is compared before the run has a summary"]
    known_arms = summary or _recomputed(run, found)
    return RunContents(
        run=run,
        arms={name: _facts(name, rows, known_arms[name]) for name, rows in found.items()},
        ledger=ledger,
        comparison=comparison,
        missing=missing,
        notes=notes,
    )


def _read_if_there(read: Callable[[], T], file: Path) -> T | None:
    """What `read` gives; None where a run ended before it wrote the file."""
    try:
        return read()
    except ConfigError:
        if file.exists():
            raise
        return None


def _facts(name: str, rows: Sequence[SampleRow], summary: ArmSummary) -> ArmFacts:
    timed = [
        (row.ttft_ms, place, row.repeat)
        for place, row in placed(rows)
        if row.timed and row.ttft_ms is not None
    ]
    ttft, places, repeats = zip(*timed, strict=True) if timed else ((), (), ())
    return ArmFacts(name, rows, summary, ttft, places, repeats, _score_interval(rows))


def _score_interval(rows: Sequence[SampleRow]) -> Interval | None:
    """95 % for the mean score, unparsed as 0, by Student's t over sets of documents.

    None of a single set, and where all have the same score, which says nothing of the spread.
    """
    answered = [row for row in rows if row.error is None]
    known = [(0.0 if r.outcome == "unparsed" else r.score, r) for r in answered]
    scores = [(score, r.cluster or r.sample) for score, r in known if score is not None]
    if not scores:
        return None
    values, clusters = zip(*scores, strict=True)
    found = StudentMean.of(sum_clusters(np.asarray(values, dtype=np.float64), clusters))
    interval = found.interval()
    if interval is None or not found.standard_error:
        return None
    return interval.within(0.0, 1.0)


def _recomputed(run: Run, rows: Mapping[str, list[SampleRow]]) -> Mapping[str, ArmSummary]:
    """What rows alone say, for a run that ended early: no throughput and no blocks."""
    tallies = {name: Tally(rows=found) for name, found in rows.items()}
    metric = run.manifest["workload"]["metric"] or "score"
    return summarise(tallies, metric=metric, meaningful=run.manifest["model"]["meaningful"])


def _compare_with_full(run: Run, margin: float) -> tuple[RunComparison | None, list[str]]:
    arms = measured_arms(run)
    if BASELINE not in arms:
        return None, [f"no arm {BASELINE} to compare with"]
    others = [arm for name, arm in arms.items() if name != BASELINE]
    if not others:
        return None, [f"{BASELINE} is the only arm: nothing is compared"]
    notes: list[str] = []
    settings = ComparisonSettings(margin=margin)
    found = [_compare(arms[BASELINE], arm, settings, notes) for arm in others]
    compared = adjusted([arm for arm in found if arm is not None])
    if not compared:
        return None, notes
    score = next(iter(run.summary.values())).score
    path = str(run.path)
    return RunComparison(path, path, score.metric, score.meaningful, settings, compared), notes


def _compare(
    full: MeasuredArm, arm: MeasuredArm, settings: ComparisonSettings, notes: list[str]
) -> ArmComparison | None:
    """Compare, if anything was answered by both; `notes` get what is not so."""
    try:
        return compare_in_run(full, arm, settings, notes)
    except IncomparableRuns as error:
        notes.append(f"{arm.name}: {error.message}")
        return None


def drop_at_most(metric: MetricChange) -> float | None:
    """The bound of the loss of a score from 0 to 1, with 95 % confidence; None of a single set."""
    unseen, bounds = unseen_share(metric.change), loss_bounds(metric.change)
    if unseen is not None:
        return unseen
    return None if bounds is None else max(0.0, -bounds.low)


def unseen_loss(metric: MetricChange) -> float | None:
    """The share of samples whose loss may have gone unseen, where that leaves the loss open."""
    return unseen_share(metric.change) if metric.loss is Loss.UNKNOWN else None
