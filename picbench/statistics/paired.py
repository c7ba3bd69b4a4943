"""Two measurements of the same samples: differences of scores, ratios of times."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from math import exp

import numpy as np

from picbench.statistics.bootstrap import Interval, MeanBootstrap
from picbench.statistics.clusters import Floats, sum_clusters
from picbench.statistics.crossed_mean import CrossedMean
from picbench.statistics.significance import mcnemar, sign_flip
from picbench.statistics.student import FEW, StudentMean


@dataclass(frozen=True, slots=True)
class Paired:
    """A change from one measurement to another, over `pairs` samples in `clusters`.

    `value` is the mean difference, or the geometric mean ratio where `ratio`. `interval` covers the
    truth with 95 %. The ends of `one_sided` are bounds of 95 % each: the truth is above its low end
    with 95 % confidence. Both are None for a single cluster. `p` is two-sided, for no change.
    `standard_error` is that of the mean difference, or of the mean log ratio. Samples are `higher`,
    `equal` or `lower` in the second measurement. `exact_p` is McNemar's, where all values are 0
    or 1 and every sample is its own cluster.

    The means of clusters changed by `least` to `most`, or their mean logarithms where `ratio`.
    `freedom` are the degrees of freedom of `standard_error`, 0 for a single cluster. Where
    `repeats` are several, how these differ is in interval, p and standard error.
    """

    value: float
    ratio: bool
    pairs: int
    clusters: int
    interval: Interval | None
    one_sided: Interval | None
    p: float
    standard_error: float
    higher: int
    equal: int
    lower: int
    exact_p: float | None = None
    freedom: float = 0.0
    repeats: int = 1
    least: float = 0.0
    most: float = 0.0


def paired_difference(
    before: Sequence[float],
    after: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    seed: int = 0,
) -> Paired:
    """The mean of `after` minus `before`, sample by sample. Raises ValueError without a sample."""
    first, second = _arrays(before, after)
    return _change(second - first, clusters, seed, exact=_binary(first) and _binary(second))


def paired_scores(
    before: Sequence[float],
    after: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    seed: int = 0,
) -> Paired:
    """The difference of scores from 0 to 1, of which the mean is between -1 and 1.

    Student's t knows nothing of such ends, and of a few samples reaches beyond them.
    """
    found = paired_difference(before, after, clusters, seed)
    return replace(
        found,
        interval=found.interval and found.interval.within(-1.0, 1.0),
        one_sided=found.one_sided and found.one_sided.within(-1.0, 1.0),
    )


def paired_ratio(
    before: Sequence[float],
    after: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    seed: int = 0,
    repeats: Sequence[Hashable] | None = None,
) -> Paired:
    """The geometric mean of `after` over `before`.

    Few clusters are tested by Student's t: logarithms of times are continuous, unlike scores, whose
    signs are flipped however few they are. With `repeats` [n] the two were measured one after
    another in each of these, so that a ratio of theirs has more to it than its requests have; the
    interval and p are then those of `CrossedMean`.
    Raises ValueError without a sample, and for a value that is not positive.
    """
    first, second = _arrays(before, after)
    if (first <= 0).any() or (second <= 0).any():
        raise ValueError("ratios need positive values")
    changes = np.log(second) - np.log(first)
    found = _change(changes, clusters, seed, ratio=True)
    if repeats is None or found.clusters < 2 or len(set(repeats)) < 2:
        return found
    return _over_repeats(found, changes, clusters, repeats)


def _over_repeats(
    found: Paired,
    changes: Floats,
    clusters: Sequence[Hashable] | None,
    repeats: Sequence[Hashable],
) -> Paired:
    rows, repeated = (StudentMean.of(sum_clusters(changes, by)) for by in (clusters, repeats))
    crossed = CrossedMean(rows, repeated)
    return replace(
        found,
        interval=_scaled(crossed.interval(0.95), ratio=True),
        one_sided=_scaled(crossed.interval(0.90), ratio=True),
        p=crossed.p,
        standard_error=crossed.standard_error,
        freedom=crossed.freedom,
        repeats=repeated.clusters,
    )


def _change(
    changes: Floats,
    clusters: Sequence[Hashable] | None,
    seed: int,
    *,
    ratio: bool = False,
    exact: bool = False,
) -> Paired:
    grouped = sum_clusters(changes, clusters)
    student = StudentMean.of(grouped)
    few = student.clusters <= FEW
    mean = student if few else MeanBootstrap(grouped, seed)
    higher, lower = int((changes > 0).sum()), int((changes < 0).sum())
    single = student.clusters == len(changes)
    means = grouped.sums / grouped.counts
    return Paired(
        value=exp(student.mean) if ratio else student.mean,
        ratio=ratio,
        pairs=len(changes),
        clusters=student.clusters,
        interval=_scaled(mean.interval(0.95), ratio),
        one_sided=_scaled(mean.interval(0.90), ratio),
        p=student.p if few and ratio else sign_flip(grouped, seed),
        standard_error=student.standard_error,
        higher=higher,
        equal=len(changes) - higher - lower,
        lower=lower,
        exact_p=mcnemar(higher, lower) if exact and single else None,
        freedom=student.clusters - 1.0,
        least=float(means.min()),
        most=float(means.max()),
    )


def _scaled(interval: Interval | None, ratio: bool) -> Interval | None:
    if interval is None or not ratio:
        return interval
    return Interval(exp(interval.low), exp(interval.high), interval.level)


def _arrays(before: Sequence[float], after: Sequence[float]) -> tuple[Floats, Floats]:
    first, second = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    if first.shape != second.shape:
        raise ValueError(f"{len(first)} values cannot be paired with {len(second)}")
    return first, second


def _binary(values: Floats) -> bool:
    return bool(np.isin(values, (0.0, 1.0)).all())
