"""One arm of a run in columns, and what changed from one arm to another."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from itertools import compress
from math import isqrt
from operator import ne
from typing import Any, Self

import numpy as np

from picbench.errors import ConfigError, IncomparableRuns
from picbench.statistics import significance
from picbench.statistics.intervals import Quantile, quantile
from picbench.store.reader import Run, check_rows
from picbench.store.records import SampleRow, Score, Time
from picbench.store.summary import ArmSummary
from picbench.tables.metrics import METRICS, OF_ANSWERS, Pairing, metrics_paired

#: Times of a request and what else has ratios, and counts, which are compared request by request.
TIMES = tuple(m.name for m in metrics_paired(Pairing.RATIO) if m.of_row)
COUNTERS = {m.name: m.of_row for m in metrics_paired(Pairing.COUNT) if m.of_row}

#: Counts of a whole arm, and its rates.
TOTALS = tuple(m.name for m in metrics_paired(Pairing.COUNT) if not m.of_row)
RATES = tuple(m.name for m in metrics_paired(Pairing.WHOLE))

#: Characters that are kept of a hash: two of 10,000 prompts are alike in them once in 10^11 runs.
_HASH = 16


#: A value a request, by name; None where an arm does not have it.
Columns = dict[str, list[Any]]


@dataclass(frozen=True, slots=True)
class MeasuredArm:
    """The answered requests of one arm, a value a request in every column.

    `samples` are unique: the answer to one in the second repeat is ``"name#2"``, a second answer
    in one repeat ``"name+1"``. Samples of one of `clusters` share documents. `rounds`, and the
    `places` of requests in the order of the run, begin anew in each of the `repeats`, which are
    numbered from 0. Scores and times are None where there are none. `prompts` and `outputs` are the
    beginnings of SHA-256 hashes. `totals` has counts and rates of the whole arm, as far as they are
    known. `drift` is the standard deviation of the logarithm of mean times, and of rates, between
    several runs that an arm of a baseline was made from.

    Raises ValueError for columns of different lengths.
    """

    name: str
    samples: tuple[str, ...]
    clusters: tuple[str, ...]
    rounds: tuple[int, ...]
    places: tuple[int, ...]
    repeats: tuple[int, ...]
    prompts: tuple[str, ...]
    outputs: tuple[str, ...]
    scores: tuple[Score | None, ...]
    times: Mapping[str, tuple[Time | None, ...]]
    counters: Mapping[str, tuple[int, ...]]
    totals: Mapping[str, float]
    drift: Mapping[str, float] = field(default_factory=dict)
    documents: tuple[frozenset[str], ...] = ()

    def __post_init__(self) -> None:
        for name, column in self._columns():
            if len(column) != len(self.samples):
                raise ValueError(f"{name} has {len(column)} values, samples {len(self.samples)}")

    def _columns(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        for name in (f.name for f in fields(self) if f.name not in ("name", "totals", "drift")):
            values = getattr(self, name)
            if isinstance(values, Mapping):
                yield from ((f"{name}.{key}", column) for key, column in values.items())
            elif values or name != "documents":
                yield name, values

    def of_rows(self, rows: Sequence[int]) -> Self:
        """The arm with these rows of its columns."""
        taken: dict[str, Any] = {"times": {}, "counters": {}}
        for name, column in self._columns():
            group, _, key = name.partition(".")
            values = tuple(map(column.__getitem__, rows))
            taken |= {group: {**taken[group], key: values} if key else values}
        return replace(self, **taken)

    def total(self, name: str) -> float | None:
        """A count over all samples, or a rate; None where the arm does not have it."""
        return sum(self.counters[name]) if name in self.counters else self.totals.get(name)


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
    known = documents_of(run)
    return {name: arm_of(name, own, run.summary.get(name), known) for name, own in rows.items()}


def documents_of(run: Run) -> dict[str, frozenset[str]]:
    """The ids of each sample's chunks, where clusters do not tell samples' documents apart.

    That is where all samples are one cluster, or all have the same documents. Empty otherwise, and
    for a run that did not keep what it sent.
    """
    if all(len({getattr(row, name) for row in run.rows}) > 1 for name in ("cluster", "documents")):
        return {}
    try:
        sent = run.workload
    except ConfigError:
        return {}
    chunks = {name: (s.chunk for s in sample.segments) for name, sample in sent.items()}
    return {name: frozenset(str(c) for c in ids if c is not None) for name, ids in chunks.items()}


def arm_of(
    name: str,
    rows: Sequence[SampleRow],
    summary: ArmSummary | None,
    documents: Mapping[str, frozenset[str]],
) -> MeasuredArm:
    """The columns of an arm from its rows, in the order of the run; `documents` are by sample."""
    answered = [row for row in rows if row.error is None]
    firsts: dict[int, int] = {}
    sent, seen = Counter[int](), Counter[str]()
    places, samples = list[int](), list[str]()
    for row in rows:
        firsts[row.repeat] = min(row.round, firsts.get(row.repeat, row.round))
        if row.error is None:
            label = row.sample if not row.repeat else f"{row.sample}#{row.repeat + 1}"
            places.append(sent[row.repeat])
            samples.append(f"{label}+{seen[label]}" if seen[label] else label)
            seen[label] += 1
        sent[row.repeat] += 1
    failed = {(row.sample, row.repeat) for row in rows if row.error is not None}
    failed -= {(row.sample, row.repeat) for row in answered}  # Those that went well when repeated.
    totals = {t: METRICS[t].value(summary) for t in (*TOTALS, *RATES)} if summary else {}
    counts: Columns = {c: [of_row(row) for row in answered] for c, of_row in COUNTERS.items()}
    return MeasuredArm(
        name=name,
        samples=tuple(samples),
        clusters=tuple(row.cluster or row.sample for row in answered),
        rounds=tuple(row.round - firsts[row.repeat] for row in answered),
        places=tuple(places),
        repeats=tuple(row.repeat for row in answered),
        prompts=tuple(row.prompt_sha256[:_HASH] for row in answered),
        outputs=tuple((row.output_sha256 or "")[:_HASH] for row in answered),
        scores=tuple(row.score for row in answered),
        times={
            t: tuple(getattr(r, t) if r.timed or t in OF_ANSWERS else None for r in answered)
            for t in TIMES
        },
        # A remote server does not give all counts.
        counters={
            name: tuple(map(int, column)) for name, column in counts.items() if None not in column
        },
        totals={t: v for t, v in totals.items() if v is not None} | {"failed": len(failed)},
        documents=tuple(documents.get(row.sample, frozenset()) for row in answered if documents),
    )


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

    `before` and `after` are means, geometric ones of times. `p` is that of `change`, adjusted for
    all tests of the comparison. `loss` judges a score against the margin that was asked for, on
    other documents, and `needed` is how many samples would decide that; without a margin, how many
    give a score an interval of one point to either side.
    """

    name: str
    before: float
    after: float
    change: significance.Paired
    p: float | None
    loss: significance.Loss | None = None
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
    """A quantile of a time before and after, each with its interval over all answered requests."""

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
    both arms have a score of and, where others exist, ``score, unparsed as 0`` over all. The
    answers to `reworded` samples have other tokens and the same score.
    """

    before: str
    after: str
    pairs: int
    unpaired: int
    metrics: tuple[MetricChange, ...]
    quantiles: tuple[QuantileChange, ...]
    counters: tuple[CounterChange, ...]
    flips: tuple[Flip, ...]
    repeatability: significance.Nondeterminism
    reworded: tuple[str, ...] = ()
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
    `apart`: their milliseconds drift, and are compared in larger batches. Of an arm that answered
    nothing only the totals are compared. Raises IncomparableRuns where both answered and no sample
    is in both, and for samples whose prompts differ, unless that is allowed.
    """
    places = {sample: place for place, sample in enumerate(after.samples)}
    shared = [row for row, sample in enumerate(before.samples) if sample in places]
    if not shared and before.samples and after.samples:
        raise IncomparableRuns(
            f"{before.name} and {after.name} have no answered sample in common",
            hint="compare runs of the same workload",
        )
    first = before.of_rows(shared)
    second = after.of_rows([places[sample] for sample in first.samples])
    differ = list(compress(first.samples, map(ne, first.prompts, second.prompts)))
    if differ and not allow_mismatch:
        raise IncomparableRuns(
            f"{len(differ)} of {len(shared)} samples have other prompts, the first: {differ[0]}",
            hint="compare runs of the same workload and tokenizer",
        )
    scores = list(zip(first.samples, first.scores, second.scores, strict=True))
    flips = [Flip(*row) for row in scores if row[1] != row[2]]
    others = map(ne, first.outputs, second.outputs)
    # Two arms of one run took turns within a repeat, unless all was one round: an open loop.
    interleaved = len(set(before.rounds)) > 1
    return ArmComparison(
        before=before.name,
        after=after.name,
        pairs=len(shared),
        unpaired=len({*before.samples} ^ {*after.samples}),
        metrics=(
            *_scores(first, second, margin, seed),
            *_times(first, second, interleaved=interleaved, apart=apart, seed=seed),
        ),
        quantiles=tuple(
            QuantileChange(m.base, *(quantile_of(a, m.base, m.quantile) for a in (before, after)))
            for m in metrics_paired(Pairing.QUANTILE)
            if m.base and m.quantile
        ),
        counters=(*_counters(first, second), *_totals(TOTALS, before, after)),
        flips=tuple(sorted(flips, key=lambda f: -abs((f.after or 0.0) - (f.before or 0.0)))),
        repeatability=significance.nondeterminism(
            *(dict(zip(arm.samples, arm.outputs, strict=True)) for arm in (first, second))
        ),
        reworded=tuple(
            row[0] for row, other in zip(scores, others, strict=True) if other and row[1] == row[2]
        ),
        rates=tuple(_totals(RATES, before, after)),
    )


def _scores(
    before: MeasuredArm, after: MeasuredArm, margin: float | None, seed: int
) -> Iterator[MetricChange]:
    documents = before.documents or [frozenset[str]()] * len(before.samples)
    requests = [
        prompt or sample for prompt, sample in zip(before.prompts, before.samples, strict=True)
    ]
    columns = (before.scores, after.scores, before.clusters, requests, documents)
    pairs = list(zip(*columns, strict=True))
    scored = [a is not None and b is not None for a, b, *_ in pairs]
    every = [(a or 0.0, b or 0.0, *names) for a, b, *names in pairs]
    found = {SCORE: list(compress(every, scored))}
    if not all(scored) and any(score is not None for pair in pairs for score in pair[:2]):
        found[SCORE_OF_ALL] = every
    for name, rows in found.items():
        if not rows:
            continue
        first, second, clusters, asked, sets = zip(*rows, strict=True)
        change = significance.paired_scores(first, second, clusters, seed, asked, sets)
        if margin is None:
            loss, needed = None, significance.samples_for_width(change, POINT)
        else:
            loss = significance.judge_loss(change, margin)
            needed = significance.samples_to_judge(change, margin)
            if not change.lower:  # Samples that did not lose do not say how many others do.
                needed = max(needed or 0, significance.clusters_without_loss(margin))
        mean, other = float(np.mean(first)), float(np.mean(second))
        yield MetricChange(name, mean, other, change, change.p, loss, needed)


def _times(
    before: MeasuredArm, after: MeasuredArm, *, interleaved: bool, apart: bool, seed: int
) -> Iterator[MetricChange]:
    """Ratios of times, by what is nearly independent: rounds of requests that waited together.

    A round of all repeats is one: these are the same requests. Where there is a single one (an open
    loop), and for runs `apart`, neighbours are taken together. What lasts for minutes is the same
    for all requests of a repeat.
    """
    single = len(set(before.rounds)) == 1
    batches = _batches(before.places if single else before.rounds)
    for name in (name for name in before.times if name in after.times):
        separate = apart and name.endswith("_ms")
        groups: Sequence[Any] = batches if single or separate else before.rounds
        # What took turns is as far apart in every repeat, and rounds say by how much.
        alike = interleaved and not separate
        if name in OF_ANSWERS:  # The machine does not change it, documents do.
            linked = len({*before.clusters}) < 2
            groups, alike = before.prompts if linked else before.clusters, True
        numbers = [0] * len(groups) if alike else before.repeats
        columns = zip(before.times[name], after.times[name], groups, numbers, strict=True)
        known = [(a, b, group, repeat) for a, b, group, repeat in columns if a and b]
        if not known:
            continue
        first, second, clusters, repeats = zip(*known, strict=True)
        change = significance.paired_ratio(first, second, clusters, seed, repeats)
        mean, other = (float(np.exp(np.mean(np.log(column)))) for column in (first, second))
        # Repeats of one run say how far its arms drift apart; none does of two runs.
        told = Drift.REPEATS if change.repeats > 1 and not apart else Drift.UNSEEN
        drift = Drift.ALIKE if alike else told
        yield MetricChange(name, mean, other, change, change.p, drift=drift)


def _batches(numbers: Sequence[int]) -> list[int]:
    """Batches of neighbouring rounds, or requests, as many as each has of these.

    What slows a machine down lasts longer than a round, so that rounds of separate runs are not
    independent: neighbours had correlations of 0.6 (batch means, as for any time series).
    """
    known = sorted(set(numbers))
    batches = {number: place // isqrt(len(known)) for place, number in enumerate(known)}
    return [batches[number] for number in numbers]


def quantile_of(arm: MeasuredArm, time: str, q: float) -> Quantile:
    """A quantile of a time over all answered requests, with its interval."""
    known = [value is not None for value in arm.times[time]]
    times = [value for value in arm.times[time] if value is not None]
    places, repeats = (tuple(compress(column, known)) for column in (arm.places, arm.repeats))
    return quantile(times, q, places, repeats)


def _counters(before: MeasuredArm, after: MeasuredArm) -> Iterator[CounterChange]:
    for name in COUNTERS if before.samples else ():
        if name in before.counters and name in after.counters:
            first, second = before.counters[name], after.counters[name]
            yield CounterChange(name, sum(first), sum(second), sum(map(ne, first, second)))


def _totals(
    names: Sequence[str], before: MeasuredArm, after: MeasuredArm
) -> Iterator[CounterChange]:
    for name in names:
        if name in before.totals and name in after.totals:
            yield CounterChange(name, before.totals[name], after.totals[name], None)
