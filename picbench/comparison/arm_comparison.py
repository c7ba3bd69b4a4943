"""One arm against another, over the samples that both answered."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from picbench.comparison.measured_arm import COUNTERS, TOTALS, MeasuredArm
from picbench.comparison.pairing import Pairs
from picbench.statistics.non_inferiority import (
    Loss,
    clusters_without_loss,
    judge_loss,
)
from picbench.statistics.paired import Paired, paired_ratio, paired_scores
from picbench.statistics.power import samples_for_width, samples_to_judge
from picbench.statistics.quantiles import Quantile
from picbench.statistics.repeatability import Nondeterminism, nondeterminism
from picbench.statistics.repeated_quantiles import repeated_quantile

#: Scores of the samples that have one in both arms, and of all of them.
SCORE, SCORE_OF_ALL = "score", "score, unparsed as 0"

#: The time whose quantiles are told, and which these are.
WAIT, QUANTILES = "ttft_ms", (0.5, 0.9, 0.99)

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

    `samples` is None for counts of a whole arm.
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
        counters=(*_counters(pairs), *_totals(before, after)),
        flips=tuple(_flips(pairs)),
        repeatability=nondeterminism(
            dict(zip(before.samples, before.outputs, strict=True)),
            dict(zip(after.samples, after.outputs, strict=True)),
        ),
    )


def _scores(pairs: Pairs, margin: float | None, seed: int) -> Iterator[MetricChange]:
    first, second = pairs.of(pairs.before.scores, pairs.after.scores)
    known = list(zip(first, second, pairs.documents, strict=True))
    scored = [(a, b, cluster) for a, b, cluster in known if a is not None and b is not None]
    if not any(a is not None or b is not None for a, b, _ in known):
        return
    if scored:
        yield _score(SCORE, scored, margin, seed)
    if len(scored) < len(known):
        yield _score(SCORE_OF_ALL, [(a or 0.0, b or 0.0, c) for a, b, c in known], margin, seed)


def _score(
    name: str, scores: Iterable[tuple[float, float, str]], margin: float | None, seed: int
) -> MetricChange:
    before, after, clusters = zip(*scores, strict=True)
    change = paired_scores(before, after, clusters, seed)
    return MetricChange(
        name=name,
        before=float(np.mean(before)),
        after=float(np.mean(after)),
        change=change,
        p=change.p,
        loss=None if margin is None else judge_loss(change, margin),
        needed=_needed(change, margin),
    )


def _needed(change: Paired, margin: float | None) -> int | None:
    if margin is None:
        return samples_for_width(change, POINT)
    needed = samples_to_judge(change, margin)
    # Samples that did not lose do not say how many others do.
    return needed if change.lower else max(needed or 0, clusters_without_loss(margin))


def _times(pairs: Pairs, apart: bool, seed: int) -> Iterator[MetricChange]:
    before, after = pairs.before.times, pairs.after.times
    for name in (name for name in before if name in after):
        separate = apart and name.endswith("_ms")
        clusters = pairs.batches if separate else pairs.rounds
        # What took turns is as far apart in every repeat, and rounds say by how much.
        alike = pairs.interleaved and not separate
        repeats = [0] * len(pairs) if alike else pairs.repeats
        columns = zip(*pairs.of(before[name], after[name]), clusters, repeats, strict=True)
        known = [(a, b, cluster, repeat) for a, b, cluster, repeat in columns if a and b]
        if known:
            found = _time(name, known, seed)
            yield found if alike else replace(found, drift=_drift(found.change, apart=apart))


def _time(name: str, times: Iterable[tuple[float, float, int, int]], seed: int) -> MetricChange:
    before, after, clusters, repeats = zip(*times, strict=True)
    change = paired_ratio(before, after, clusters, seed, repeats)
    return MetricChange(name, _geometric(before), _geometric(after), change, change.p)


def _drift(change: Paired, *, apart: bool) -> Drift:
    """Repeats of one run say how far its arms drift apart; none does of two runs."""
    return Drift.REPEATS if change.repeats > 1 and not apart else Drift.UNSEEN


def _quantiles(before: MeasuredArm, after: MeasuredArm) -> Iterator[QuantileChange]:
    for q in QUANTILES:
        yield QuantileChange(WAIT, _quantile(before, q), _quantile(after, q))


def _quantile(arm: MeasuredArm, q: float) -> Quantile:
    columns = zip(arm.times[WAIT], arm.places, arm.repeats, strict=True)
    known = [(time, place, repeat) for time, place, repeat in columns if time is not None]
    times, places, repeats = zip(*known, strict=True) if known else ((), (), ())
    return repeated_quantile(times, q, places, repeats)


def _geometric(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


def _counters(pairs: Pairs) -> Iterator[CounterChange]:
    before, after = pairs.before.counters, pairs.after.counters
    for name in COUNTERS:
        if name in before and name in after:
            first, second = pairs.of(before[name], after[name])
            differ = sum(a != b for a, b in zip(first, second, strict=True))
            yield CounterChange(name, sum(first), sum(second), differ)


def _totals(before: MeasuredArm, after: MeasuredArm) -> Iterator[CounterChange]:
    for name in TOTALS:
        if name in before.totals and name in after.totals:
            yield CounterChange(name, before.totals[name], after.totals[name], None)


def _flips(pairs: Pairs) -> list[Flip]:
    """Samples whose score changed, the largest changes first."""
    scores = pairs.of(pairs.before.scores, pairs.after.scores)
    flips = [Flip(*row) for row in zip(pairs.samples, *scores, strict=True) if row[1] != row[2]]
    return sorted(flips, key=lambda flip: -abs((flip.after or 0.0) - (flip.before or 0.0)))
