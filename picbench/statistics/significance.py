"""Tests of paired differences, and what several tests together are worth."""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil, exp, hypot, inf, log, sqrt

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

from picbench.statistics import intervals
from picbench.statistics.intervals import FEW, MANY, ClusterSums, Floats, Interval, Names, Values

#: Random assignments of signs, and up to how many clusters all are tried: 2^13 are fewer.
FLIPS, _EXACT = 9999, 13

_BATCH = 1 << 22

#: Why nothing is known of other documents.
SAME = "all requests have the same documents"
LINKED = "all requests are linked by documents that they share"

#: The p below which a change is none of chance.
SURE = 0.05


def sign_flip(values: ClusterSums, seed: int = 0, flips: int = FLIPS) -> float:
    """Two-sided p of paired differences whose mean is 0 if both sides are exchangeable.

    The signs of whole clusters are flipped (Fisher's randomisation test): all ways to do so for few
    clusters, else `flips` random ones, of which p = (1 + those at least as extreme) / (1 + flips)
    (Phipson, Smyth 2010). Clusters of no difference decide nothing and are left out. Where the
    others are of one size, as right and wrong answers are, p is binomial (McNemar 1947).
    """
    sums = values.sums[values.sums != 0]
    if not len(sums):
        return 1.0
    sizes = np.abs(sums)
    if np.ptp(sizes) <= 1e-9 * sizes.max():
        return float(stats.binomtest(int((sums > 0).sum()), len(sums)).pvalue)
    # Sums in another order differ in their last bits; equal ones must count as such.
    least = abs(float(sums.sum())) - 1e-9 * float(sizes.sum())
    if len(sums) <= _EXACT:
        totals = np.zeros(1)
        for value in sums:
            totals = np.concatenate((totals + value, totals - value))
        return int((np.abs(totals) >= least).sum()) / len(totals)
    # A bit says whether a cluster is flipped; what is flipped counts twice, negatively.
    # `scipy.stats.permutation_test` draws and sorts two numbers for it: eight times the work.
    rng, octets, extreme = np.random.default_rng(seed), -(-len(sums) // 8), 0
    size = max(1, _BATCH // (8 * octets))
    for begin in range(0, flips, size):
        bits = rng.integers(256, size=(min(size, flips - begin), octets), dtype=np.uint8)
        flipped = np.unpackbits(bits, axis=1, count=len(sums))
        totals = sums.sum() - 2 * (flipped.astype(np.float64) @ sums)
        extreme += int((np.abs(totals) >= least).sum())
    return (1 + extreme) / (1 + flips)


def holm(p_values: Values) -> list[float]:
    """p adjusted for being several (Holm 1979): the chance of any false alarm stays below each."""
    order, count = np.argsort(p_values, kind="stable"), len(p_values)
    steps = np.arange(count, 0, -1) * np.asarray(p_values, np.float64)[order]
    adjusted = np.empty(count)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(steps))
    return [float(p) for p in adjusted]


@dataclass(frozen=True, slots=True)
class Paired:
    """A change from one measurement to another, over `pairs` samples in `clusters`.

    `value` is the mean difference, or the geometric mean ratio where `ratio`. `interval` covers the
    truth with 95 %. The ends of `one_sided` are bounds of 95 % each: the truth is above its low end
    with 95 % confidence. `p_others` is two-sided, for no change. These three are of other clusters;
    they are None where nothing is known of these, and for scores `unknown` says why. `p` is that
    for no change on the same requests, whatever they share; of times it is `p_others`, as no time
    can be measured twice. `standard_error` is that of the mean difference, or of the mean log
    ratio. Samples are `higher`, `equal` or `lower` in the second measurement. `exact_p` is `p`
    where that is McNemar's, of right (1) and wrong (0) answers to requests that were asked once.

    `freedom` are the degrees of freedom of `standard_error`, 0 for a single cluster. Where
    `repeats` are several, how these differ is in interval, p and standard error.
    """

    value: float
    ratio: bool
    pairs: int
    clusters: int
    interval: Interval | None
    one_sided: Interval | None
    p: float | None
    p_others: float | None
    standard_error: float
    higher: int
    equal: int
    lower: int
    exact_p: float | None = None
    freedom: float = 0.0
    repeats: int = 1
    unknown: str | None = None


def paired_scores(
    before: Values,
    after: Values,
    clusters: Names | None = None,
    seed: int = 0,
    requests: Names | None = None,
    documents: Sequence[Set[Hashable]] | None = None,
) -> Paired:
    """The mean of `after` minus `before`, scores from 0 to 1, sample by sample.

    Samples of one of `requests` [n] are the same one, asked again; `documents` [n] are what they
    ask about. Raises ValueError without a sample.
    """
    first, second = _arrays(before, after)
    changes, names = second - first, requests or range(len(first))
    rows = intervals.sum_clusters(changes, names)
    p, once = sign_flip(rows, seed), len(rows.sums) == len(changes)
    exact = p if once and np.isin((first, second), (0.0, 1.0)).all() else None
    found = replace(_change(changes, clusters, seed), p=p, exact_p=exact)
    known = dict(zip(names, documents or (), strict=False)).values()
    shared = frozenset[Hashable]().union(*known).intersection(*known)
    own = [of_request - shared for of_request in known]
    if shared and len(own) > 1 and not any(own):
        return _unknown(found, SAME)
    if found.clusters > 1:
        return found
    return _crossed(found, rows.sums / rows.counts, own) or _unknown(found, LINKED)


def _unknown(found: Paired, why: str) -> Paired:
    """The change, of which nothing is known on other documents."""
    return replace(found, interval=None, one_sided=None, p_others=None, unknown=why)


def _crossed(found: Paired, changes: Floats, documents: Sequence[Set[Hashable]]) -> Paired | None:
    """What is known of `changes` [n] of requests that share some of their `documents` [n].

    The variance of the mean is that of the pigeonhole bootstrap, which draws questions and
    documents apart (Owen 2007), in closed form. It is rather too large than too small. `clusters`
    are so many independent requests as would have it. None where changes do not vary.
    """
    count, away = len(changes), changes - changes.mean()
    sums = defaultdict[Hashable, float](float)
    for own, change in zip(documents, away, strict=False):
        for document in own:
            sums[document] += change
    if len(sums) < 2 or not away.any():
        return None
    kinds = (away, np.array([*sums.values()]))
    errors = [sqrt(len(kind) / (len(kind) - 1) * float(kind @ kind)) / count for kind in kinds]
    parts = [*zip(errors, map(len, kinds), strict=True)]
    mean = intervals.StudentMean(float(changes.mean()), parts)
    requests = intervals.sum_clusters(changes)

    def at(level: float) -> Interval | None:
        # Requests count for as many independent ones as Student's t reaches as far with.
        own = mean.interval(level)
        reach = own.high - mean.mean if own else inf
        weight = min(1.0, (float(stats.norm.isf((1 - level) / 2)) * errors[0] / reach) ** 2)
        return intervals.BoundedMean(requests, -1.0, 1.0, weight).interval(level)

    return replace(
        found,
        clusters=max(1, int(count * (errors[0] / mean.standard_error) ** 2)),
        interval=at(0.95),
        one_sided=at(0.90),
        p_others=mean.p,
        standard_error=mean.standard_error,
        freedom=mean.freedom,
    )


def paired_ratio(
    before: Values,
    after: Values,
    clusters: Names | None = None,
    seed: int = 0,
    repeats: Names | None = None,
) -> Paired:
    """The geometric mean of `after` over `before`.

    Few clusters are tested by Student's t: logarithms of times are continuous, unlike scores, whose
    signs are flipped however few they are. With `repeats` [n] the two were measured one after
    another in each of these, so that a ratio of theirs has more to it than its requests have, and
    Student's t is that of both.
    Raises ValueError without a sample, and for a value that is not positive.
    """
    first, second = _arrays(before, after)
    if (first <= 0).any() or (second <= 0).any():
        raise ValueError("ratios need positive values")
    return _change(np.log(second) - np.log(first), clusters, seed, repeats, logs=True)


def _change(
    changes: Floats,
    clusters: Names | None,
    seed: int,
    repeats: Names | None = None,
    *,
    logs: bool = False,
) -> Paired:
    """A mean difference: of scores by their limits, of logarithms by Student's t or resampling."""
    rows = intervals.sum_clusters(changes, clusters)
    student, count = intervals.StudentMean.of(rows), len(rows.sums)
    normal, crossed = not FEW < count <= MANY, count > 1 and len(set(repeats or ())) > 1
    if crossed:
        student = intervals.StudentMean.of(rows, intervals.sum_clusters(changes, repeats))
    times = student if normal or crossed else intervals.MeanBootstrap(rows, seed)
    mean = times if logs else intervals.BoundedMean(rows, -1.0, 1.0)
    whole, one_sided = (
        found and found.exp() if logs else found
        for found in (mean.interval(0.95), mean.interval(0.90))
    )
    higher, lower = int((changes > 0).sum()), int((changes < 0).sum())
    p: float | None = None
    if count > 1:
        p = student.p if crossed or (logs and normal) else sign_flip(rows, seed)
    return Paired(
        value=exp(student.mean) if logs else student.mean,
        ratio=logs,
        pairs=len(changes),
        clusters=count,
        interval=whole,
        one_sided=one_sided,
        p=p,
        p_others=p,
        standard_error=student.standard_error,
        higher=higher,
        equal=len(changes) - higher - lower,
        lower=lower,
        freedom=student.freedom,
        repeats=student.parts[1][1] if crossed else 1,
    )


def _arrays(before: Values, after: Values) -> tuple[Floats, Floats]:
    first, second = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    if first.shape != second.shape:
        raise ValueError(f"{len(first)} values cannot be paired with {len(second)}")
    return first, second


class Loss(StrEnum):
    """What is known of a loss against a margin.

    `WITHIN`: below the margin with 95 % confidence. `BEYOND`: above it with 95 % confidence.
    `UNKNOWN`: neither.
    """

    WITHIN = "within"
    BEYOND = "beyond"
    UNKNOWN = "unknown"


def unseen_share(change: Paired) -> float | None:
    """The share of clusters that may lose although none of these changed; None where some did."""
    return None if change.higher or change.lower else float(1 - 0.05 ** (1 / change.clusters))


def judge_loss(change: Paired, margin: float) -> Loss:
    """Whether a difference of scores from 0 to 1 is a loss of less than `margin`, above 0.

    Bounds alone call no loss sure that chance explains by its p.
    """
    bounds = change.one_sided
    if bounds is None or change.p_others is None:
        return Loss.UNKNOWN
    if bounds.low > -margin:
        return Loss.WITHIN
    sure = bounds.high < -margin and change.p_others < SURE
    return Loss.BEYOND if sure else Loss.UNKNOWN


def clusters_without_loss(margin: float) -> int:
    """How many clusters without a loss rule out one of `margin`, above 0 and up to 1."""
    return ceil(log(0.05) / log(1 - margin)) if margin < 1 else 1


def _samples(change: Paired, distance: float, *tails: float) -> int | None:
    """Samples with which the normal quantiles of `tails` together reach as far as `distance`.

    They are taken to vary as the measured ones do. None where these did not vary.
    """
    if not change.standard_error:
        return None
    reach = sum(float(stats.norm.isf(tail)) for tail in tails)
    return ceil(change.pairs * (reach * change.standard_error / distance) ** 2)


def samples_to_judge(change: Paired, margin: float) -> int | None:
    """Samples with which `judge_loss` says, 80 % of the time, whether a loss is within `margin`.

    For a score whose true change is the measured one, with what bounds allow for unseen losses.
    None where samples did not vary, or the loss is exactly the margin.
    """
    distance = abs(change.value + margin)
    needed = _samples(change, distance, 0.05, 0.2) if distance else None

    def reach(samples: int) -> float:
        # The one that was not seen counts as much as any; quantiles are those of the tails above.
        error = change.standard_error * sqrt(change.pairs / samples)
        unseen = change.pairs / (samples * change.clusters)
        return unseen + 1.6449 * hypot(error, unseen) + 0.8416 * error

    while needed is not None and reach(needed) > distance:
        needed = ceil(1.02 * needed) + 1
    return needed


def samples_for_width(change: Paired, half_width: float) -> int | None:
    """Samples whose interval of 95 % has `half_width`; None where the measured did not vary."""
    return _samples(change, half_width, 0.025)


@dataclass(frozen=True, slots=True)
class Nondeterminism:
    """`differing` of `pairs` answers were other ones the second time.

    The interval of the rate is exact (Clopper, Pearson 1934); None without a pair.
    """

    pairs: int
    differing: int
    interval: Interval | None


def nondeterminism(first: Mapping[str, str], second: Mapping[str, str]) -> Nondeterminism:
    """Compare hashes of answers by sample; samples of one side only do not count."""
    shared = first.keys() & second.keys()
    if not shared:
        return Nondeterminism(0, 0, None)
    differing = sum(first[sample] != second[sample] for sample in shared)
    exact = stats.binomtest(differing, len(shared)).proportion_ci(method="exact")
    interval = Interval(float(exact.low), float(exact.high), 0.95)
    return Nondeterminism(len(shared), differing, interval)
