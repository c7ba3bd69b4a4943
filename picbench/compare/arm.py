"""One arm of a run in columns, and what changed from one arm to another."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import isqrt
from typing import TypeVar

import numpy as np

from picbench.errors import ConfigError, IncomparableRuns
from picbench.statistics.intervals import Quantile, repeated_quantile
from picbench.statistics.significance import (
    Loss,
    Nondeterminism,
    Paired,
    clusters_without_loss,
    judge_loss,
    nondeterminism,
    paired_ratio,
    paired_scores,
    samples_for_width,
    samples_to_judge,
)
from picbench.store.reader import Run, check_rows
from picbench.store.records import SampleRow
from picbench.store.summary import ArmSummary
from picbench.tables.metrics import METRICS, Pairing, metrics_paired

#: Times of a request, and counts of one, that are compared request by request.
TIMES = tuple(m.name for m in metrics_paired(Pairing.RATIO) if m.of_row)
COUNTERS = tuple(m.name for m in metrics_paired(Pairing.COUNT) if m.of_row)

#: Counts of a whole arm, and its rates.
TOTALS = tuple(m.name for m in metrics_paired(Pairing.COUNT) if not m.of_row)
RATES = tuple(m.name for m in metrics_paired(Pairing.WHOLE))

#: Characters that are kept of a hash: two of 10,000 prompts are alike in them once in 10^11 runs.
_HASH = 16


@dataclass(frozen=True, slots=True)
class MeasuredArm:
    """The answered requests of one arm, a value a request in every column.

    `samples` are unique: the answer to one in the second repeat is ``"name#2"``, a second answer
    in one repeat ``"name+1"``. Samples of one of `clusters` share documents. `rounds`, and the
    `places` of requests in the order of the run, begin anew in each of the `repeats`, which are
    numbered from 0: requests of one place are the same request. A score is None where
    there is nothing to score, a time where none was measured. `prompts` and `outputs` are the
    beginnings of SHA-256 hashes. `totals` has counts and rates of the whole arm, as far as the run
    says them.
    """

    name: str
    samples: tuple[str, ...]
    clusters: tuple[str, ...]
    rounds: tuple[int, ...]
    places: tuple[int, ...]
    repeats: tuple[int, ...]
    prompts: tuple[str, ...]
    outputs: tuple[str, ...]
    scores: tuple[float | None, ...]
    times: Mapping[str, tuple[float | None, ...]]
    counters: Mapping[str, tuple[int, ...]]
    totals: Mapping[str, float]


def measured_arms(run: Run) -> dict[str, MeasuredArm]:
    """The arms of a run by name, in its order.

    Raises ConfigError for a run without a row, InvalidRun for one that lacks some of its rows.
    """
    rows: dict[str, list[SampleRow]] = {}
    for row in run.rows:
        rows.setdefault(row.arm, []).append(row)
    if not rows:
        raise ConfigError(f"{run.path}: has no rows", hint="run it again")
    check_rows(run)
    summary = run.summary
    return {name: arm_of(name, own, summary.get(name)) for name, own in rows.items()}


def arm_of(name: str, rows: Sequence[SampleRow], summary: ArmSummary | None) -> MeasuredArm:
    """The columns of an arm from its rows, in the order of the run."""
    answered = [row for row in rows if row.error is None]
    firsts: dict[int, int] = {}
    sent = Counter[int]()
    places: list[int] = []
    for row in rows:
        firsts[row.repeat] = min(row.round, firsts.get(row.repeat, row.round))
        if row.error is None:
            places.append(sent[row.repeat])
        sent[row.repeat] += 1
    failed = {(row.sample, row.repeat) for row in rows if row.error is not None}
    failed -= {(row.sample, row.repeat) for row in answered}  # Those that went well when repeated.
    whole = (*TOTALS, *RATES)
    totals = {t: METRICS[t].value(summary) for t in whole} if summary is not None else {}
    counters = {c: tuple(map(METRICS[c].of_row, answered)) for c in COUNTERS}  # type: ignore[arg-type]
    return MeasuredArm(
        name=name,
        samples=tuple(sample_labels(answered)),
        clusters=tuple(row.cluster or row.sample for row in answered),
        rounds=tuple(row.round - firsts[row.repeat] for row in answered),
        places=tuple(places),
        repeats=tuple(row.repeat for row in answered),
        prompts=tuple(row.prompt_sha256[:_HASH] for row in answered),
        outputs=tuple((row.output_sha256 or "")[:_HASH] for row in answered),
        scores=tuple(row.score for row in answered),
        times={t: tuple(getattr(r, t) if r.timed else None for r in answered) for t in TIMES},
        # A remote server does not give all counts.
        counters={c: counts for c, counts in counters.items() if None not in counts},  # type: ignore[misc]
        totals={t: v for t, v in totals.items() if v is not None} | {"failed": len(failed)},
    )


def sample_labels(answered: Iterable[SampleRow]) -> Iterator[str]:
    """What comparisons call the answered rows of one arm; see `MeasuredArm`."""
    seen = Counter[str]()
    for row in answered:
        label = row.sample if not row.repeat else f"{row.sample}#{row.repeat + 1}"
        yield f"{label}+{seen[label]}" if seen[label] else label
        seen[label] += 1


Value = TypeVar("Value")


class Pairs:
    """The samples that both arms answered, in the order of the first.

    What is independent in scores are the `documents` of each pair, and nearly so in times its
    `rounds`: groups of requests that waited for each other. A round of all repeats is one: these
    are the same requests, and relate to each other as they did before. Where there is a single one
    (an open loop), `rounds` are `batches` of neighbours. What lasts for minutes is the same for all
    requests of one of the `repeats`.

    `interleaved` says whether two arms of one run took turns within a repeat, so that drift hit
    both alike. Raises IncomparableRuns where no sample is in both.
    """

    def __init__(self, before: MeasuredArm, after: MeasuredArm) -> None:
        places = {sample: place for place, sample in enumerate(after.samples)}
        self.before, self.after = before, after
        self._first = [p for p, sample in enumerate(before.samples) if sample in places]
        self.samples = self._of_first(before.samples)
        self._second = [places[sample] for sample in self.samples]
        if not self.samples:
            raise IncomparableRuns(
                f"{before.name} and {after.name} have no answered sample in common",
                hint="compare runs of the same workload",
            )
        self.unpaired = len({*before.samples} ^ {*after.samples})
        self.interleaved = len(set(before.rounds)) > 1
        self.documents = self._of_first(before.clusters)
        self.repeats = self._of_first(before.repeats)
        rounds = self._of_first(before.rounds)
        single = len(set(rounds)) == 1
        self.batches = _batches(self._of_first(before.places) if single else rounds)
        self.rounds = self.batches if single else rounds

    def __len__(self) -> int:
        return len(self.samples)

    def of(
        self, before: Sequence[Value], after: Sequence[Value]
    ) -> tuple[list[Value], list[Value]]:
        """Values of the pairs, from a column of each arm."""
        return self._of_first(before), [after[i] for i in self._second]

    def _of_first(self, column: Sequence[Value]) -> list[Value]:
        return [column[i] for i in self._first]

    def check_prompts(self) -> None:
        """Raise IncomparableRuns where samples of one name have different prompts."""
        prompts = zip(self.samples, *self.of(self.before.prompts, self.after.prompts), strict=True)
        differ = [sample for sample, first, second in prompts if first != second]
        if differ:
            raise IncomparableRuns(
                f"{len(differ)} of {len(self)} samples have other prompts, the first: {differ[0]}",
                hint="compare runs of the same workload and tokenizer",
            )


def _batches(numbers: Sequence[int]) -> list[int]:
    """Batches of neighbouring rounds, or requests, as many as each has of these.

    What slows a machine down lasts longer than a round, so that rounds of separate runs are not
    independent: neighbours had correlations of 0.6 (batch means, as for any time series).
    """
    known = sorted(set(numbers))
    size = isqrt(len(known))
    batches = {number: place // size for place, number in enumerate(known)}
    return [batches[number] for number in numbers]


#: Scores of the samples that have one in both arms, and of all of them.
SCORE, SCORE_OF_ALL = "score", "score, unparsed as 0"

#: A point: a hundredth of a score from 0 to 1.
POINT = 0.01


class Drift(StrEnum):
    """What an interval has of a machine that gets slower or faster from minute to minute.

    `ALIKE`: the two took turns, so that it hit both. `REPEATS`: they did not, and what it did from
    repeat to repeat is in the interval. `UNSEEN`: they did not, and nothing of it is.
    """

    ALIKE = "alike"
    REPEATS = "repeats"
    UNSEEN = "unseen"


@dataclass(frozen=True, slots=True)
class MetricChange:
    """How a score (from 0 to 1, more is better) or a time (less is better) changed.

    `before` and `after` are means, geometric ones of times. `p` is adjusted for all tests of the
    comparison that this is from. `loss` judges a score against the margin that was asked for, and
    `needed` is how many samples would decide that; without a margin, how many give a score an
    interval of one point to either side. Where the two were measured one after another, the machine
    may have changed between them: `drift` says what of that is in the interval.
    """

    name: str
    before: float
    after: float
    change: Paired
    p: float
    loss: Loss | None = None
    needed: int | None = None
    drift: Drift = Drift.ALIKE

    @property
    def wins(self) -> int:
        """Samples that got better."""
        return self.change.lower if self.change.ratio else self.change.higher

    @property
    def losses(self) -> int:
        """Samples that got worse."""
        return self.change.higher if self.change.ratio else self.change.lower


@dataclass(frozen=True, slots=True)
class QuantileChange:
    """A quantile of a time before and after, each with its interval over all answered requests.

    It is over repeats as well, where there are several.
    """

    name: str
    before: Quantile
    after: Quantile


@dataclass(frozen=True, slots=True)
class CounterChange:
    """A count before and after: sums over pairs, and in how many `samples` it differs.

    `samples` is None for counts and rates of a whole arm.
    """

    name: str
    before: float
    after: float
    samples: int | None

    @property
    def same(self) -> bool:
        """Whether it is the same, for every sample."""
        return self.before == self.after and not self.samples


@dataclass(frozen=True, slots=True)
class Flip:
    """A sample whose score changed; None is no score."""

    sample: str
    before: float | None
    after: float | None


@dataclass(frozen=True, slots=True)
class ArmComparison:
    """One arm (`before`) against another (`after`), over `pairs` samples.

    `unpaired` samples have an answer of one arm only. `metrics` has ``score`` over samples that
    both arms have a score of and, where others exist, ``score, unparsed as 0`` over all.
    """

    before: str
    after: str
    pairs: int
    unpaired: int
    metrics: tuple[MetricChange, ...]
    quantiles: tuple[QuantileChange, ...]
    counters: tuple[CounterChange, ...]
    flips: tuple[Flip, ...]
    repeatability: Nondeterminism
    rates: tuple[CounterChange, ...] = ()

    def metric(self, name: str) -> MetricChange | None:
        """The change of a metric; None where nothing was measured."""
        return next((metric for metric in self.metrics if metric.name == name), None)

    def counter(self, name: str) -> CounterChange | None:
        """The change of a count; None where one arm does not have it."""
        return next((counter for counter in self.counters if counter.name == name), None)


def compare_arms(
    before: MeasuredArm,
    after: MeasuredArm,
    *,
    margin: float | None = None,
    apart: bool = False,
    allow_mismatch: bool = False,
    seed: int = 0,
) -> ArmComparison:
    """Compare two arms, sample by sample; p values are not yet adjusted for one another.

    `margin` is the loss of score to judge. Arms that did not take turns in one run were measured
    `apart`: their milliseconds drift, and are compared in larger batches. Raises IncomparableRuns
    where no sample is in both, and for samples whose prompts differ, unless that is allowed.
    """
    pairs = Pairs(before, after)
    if not allow_mismatch:
        pairs.check_prompts()
    return ArmComparison(
        before=before.name,
        after=after.name,
        pairs=len(pairs),
        unpaired=pairs.unpaired,
        metrics=(*_scores(pairs, margin, seed), *_times(pairs, apart, seed)),
        quantiles=tuple(_quantiles(before, after)),
        counters=(*_counters(pairs), *_totals(TOTALS, before, after)),
        flips=tuple(_flips(pairs)),
        repeatability=nondeterminism(
            dict(zip(before.samples, before.outputs, strict=True)),
            dict(zip(after.samples, after.outputs, strict=True)),
        ),
        rates=tuple(_totals(RATES, before, after)),
    )


def _scores(pairs: Pairs, margin: float | None, seed: int) -> Iterator[MetricChange]:
    first, second = pairs.of(pairs.before.scores, pairs.after.scores)
    known = list(zip(first, second, pairs.documents, strict=True))
    scored = [(a, b, cluster) for a, b, cluster in known if a is not None and b is not None]
    if not any(a is not None or b is not None for a, b, _ in known):
        return
    both = [(a or 0.0, b or 0.0, cluster) for a, b, cluster in known]
    for name, rows in ((SCORE, scored), (SCORE_OF_ALL, both)):
        if not rows or (name == SCORE_OF_ALL and len(scored) == len(known)):
            continue
        before, after, clusters = zip(*rows, strict=True)
        change = paired_scores(before, after, clusters, seed)
        if margin is None:
            loss, needed = None, samples_for_width(change, POINT)
        else:
            loss, needed = judge_loss(change, margin), samples_to_judge(change, margin)
            if not change.lower:  # Samples that did not lose do not say how many others do.
                needed = max(needed or 0, clusters_without_loss(margin))
        mean, other = float(np.mean(before)), float(np.mean(after))
        yield MetricChange(name, mean, other, change, change.p, loss, needed)


def _times(pairs: Pairs, apart: bool, seed: int) -> Iterator[MetricChange]:
    first, second = pairs.before.times, pairs.after.times
    for name in (name for name in first if name in second):
        separate = apart and name.endswith("_ms")
        groups = pairs.batches if separate else pairs.rounds
        # What took turns is as far apart in every repeat, and rounds say by how much.
        alike = pairs.interleaved and not separate
        numbers = [0] * len(pairs) if alike else pairs.repeats
        columns = zip(*pairs.of(first[name], second[name]), groups, numbers, strict=True)
        known = [(a, b, cluster, repeat) for a, b, cluster, repeat in columns if a and b]
        if not known:
            continue
        before, after, clusters, repeats = zip(*known, strict=True)
        change = paired_ratio(before, after, clusters, seed, repeats)
        mean, other = (float(np.exp(np.mean(np.log(column)))) for column in (before, after))
        # Repeats of one run say how far its arms drift apart; none does of two runs.
        told = Drift.REPEATS if change.repeats > 1 and not apart else Drift.UNSEEN
        drift = Drift.ALIKE if alike else told
        yield MetricChange(name, mean, other, change, change.p, drift=drift)


def _quantiles(before: MeasuredArm, after: MeasuredArm) -> Iterator[QuantileChange]:
    for metric in metrics_paired(Pairing.QUANTILE):
        if metric.base is not None and metric.quantile is not None:
            sides = (quantile_of(arm, metric.base, metric.quantile) for arm in (before, after))
            yield QuantileChange(metric.base, *sides)


def quantile_of(arm: MeasuredArm, time: str, q: float) -> Quantile:
    """A quantile of a time over all answered requests, with its interval."""
    times = np.array(arm.times[time], np.float64)  # None is no number.
    known = ~np.isnan(times)
    rows, repeats = (np.array(column)[known].tolist() for column in (arm.places, arm.repeats))
    return repeated_quantile(times[known].tolist(), q, rows, repeats)


def _counters(pairs: Pairs) -> Iterator[CounterChange]:
    before, after = pairs.before.counters, pairs.after.counters
    for name in COUNTERS:
        if name in before and name in after:
            first, second = pairs.of(before[name], after[name])
            differ = sum(a != b for a, b in zip(first, second, strict=True))
            yield CounterChange(name, sum(first), sum(second), differ)


def _totals(
    names: Iterable[str], before: MeasuredArm, after: MeasuredArm
) -> Iterator[CounterChange]:
    for name in names:
        if name in before.totals and name in after.totals:
            yield CounterChange(name, before.totals[name], after.totals[name], None)


def _flips(pairs: Pairs) -> list[Flip]:
    """Samples whose score changed, the largest changes first."""
    scores = pairs.of(pairs.before.scores, pairs.after.scores)
    flips = [Flip(*row) for row in zip(pairs.samples, *scores, strict=True) if row[1] != row[2]]
    return sorted(flips, key=lambda flip: -abs((flip.after or 0.0) - (flip.before or 0.0)))
