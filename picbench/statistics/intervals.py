"""Samples that are not independent of each other, as clusters.

Questions about the same documents succeed and fail together, and requests that were served in one
round share its queue. What varies independently is the cluster, so clusters are what is resampled
(Cameron, Gelbach, Miller 2008; Miller 2024, arXiv 2411.00640).
"""

import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import count
from math import ceil, copysign, exp, floor, hypot, log, sqrt

import numpy as np
import numpy.typing as npt
from scipy import optimize, special, stats  # type: ignore[import-untyped]

Floats = npt.NDArray[np.float64]

Values = Sequence[float]

#: What values belong to, a name each; values of one name vary together.
Names = Sequence[Hashable]

#: Resamples: ends vary by a twentieth of the interval's width from seed to seed.
RESAMPLES = 4000

#: Up to so many clusters are few, and more than so many are many, of which a mean is normal.
FEW, MANY = 13, 4000

#: Indices that are drawn at a time: what fits a cache is several times faster than all at once.
_BATCH = 1 << 20

#: The least p that is told apart from 0.
_LEAST_P = 1e-12


@dataclass(frozen=True, slots=True)
class ClusterSums:
    """Values by cluster: the sum and the count of each, both of shape [clusters]."""

    sums: Floats
    counts: Floats

    @property
    def mean(self) -> float:
        """The mean over all values."""
        return float(self.sums.sum() / self.counts.sum())


def sum_clusters(values: Floats, clusters: Names | None = None) -> ClusterSums:
    """Group `values` [n] by `clusters` [n]; without these every value is a cluster of its own.

    Raises ValueError where there is nothing to group or the lengths differ.
    """
    if not len(values):
        raise ValueError("no values")
    if clusters is None:
        return ClusterSums(values, np.ones(len(values)))
    if len(clusters) != len(values):
        raise ValueError(f"{len(values)} values in {len(clusters)} clusters")
    numbers: dict[Hashable, int] = {}
    codes = [numbers.setdefault(cluster, len(numbers)) for cluster in clusters]
    sums, counts = np.bincount(codes, values), np.bincount(codes)
    return ClusterSums(sums.astype(np.float64), counts.astype(np.float64))


@dataclass(frozen=True, slots=True)
class Interval:
    """A two-sided interval that covers the truth with probability `level`."""

    low: float
    high: float
    level: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def exp(self) -> "Interval":
        """The interval of what this one has the logarithm of."""
        return Interval(exp(self.low), exp(self.high), self.level)


@dataclass(frozen=True, slots=True)
class BoundedMean:
    """The mean over clusters of values from `least` to `most`, such as scores.

    An end of its interval is a quantile of the mean with random weights, exponential ones, of all
    clusters and of one more at that limit: other clusters may be like none of these (Learned-
    Miller, Thomas 2019, arXiv 1905.06208). It covers the truth at least as often as it says. Of
    right and wrong answers it is Clopper's and Pearson's; of answers lost and won it leaves out no
    change where McNemar's exact test does. A cluster counts for `weight` independent ones.
    """

    values: ClusterSums
    least: float
    most: float
    weight: float = 1.0

    def interval(self, level: float = 0.95) -> Interval | None:
        """Of a `level` of at least 0.5; None for a single cluster."""
        sums, counts = self.values.sums, self.values.counts
        if len(sums) < 2:
            return None
        low = _low_end(sums, counts, self.least, self.weight, level)
        return Interval(low, -_low_end(-sums, counts, -self.most, self.weight, level), level)


def _low_end(sums: Floats, counts: Floats, least: float, weight: float, level: float) -> float:
    """What the randomly weighted mean falls below with a probability of (1 - level) / 2."""
    clusters = np.c_[np.r_[least * counts.mean(), sums], np.r_[counts.mean(), counts]]
    # Values that are equal but for rounding are.
    kinds, codes = np.unique(clusters.round(12), axis=0, return_inverse=True)
    weights = np.r_[1.0, np.full(len(sums), weight)]
    sizes = np.bincount(codes.ravel(), weights).astype(np.float64)
    sums, counts = kinds.T
    means, tail = sums / counts, (1 - level) / 2
    low, width = float(means.min()), float(np.ptp(means))
    if len(kinds) == 2 and counts[0] == counts[1]:
        return low + width * float(special.betaincinv(sizes[1], sizes[0], tail))
    wanted, inner = float(stats.norm.ppf(tail)), 1e-9 * width

    def away(mean: float) -> float:
        return _deviate(sums - mean * counts, sizes) - wanted

    if not width or away(low + inner) >= 0:
        return low
    return float(optimize.brentq(away, low + inner, low + width - inner, xtol=inner))


def _deviate(factors: Floats, sizes: Floats) -> float:
    """The normal deviate of how likely the sum of `factors` times gamma variates is below 0.

    `factors` [n] have both signs, and variates have `sizes` [n]. By a saddlepoint (Barndorff-
    Nielsen 1986), with a relative error of the probability of a few percent at most.
    """
    low, high, weighted = float(factors.min()), float(factors.max()), sizes * factors

    def slope(at: float) -> float:
        return float(weighted @ (1 / (1 - at * factors))) * (1 - at * low) * (1 - at * high)

    least, most = ((1 - 1e-9) / end for end in (low, high))
    at = optimize.brentq(slope, least, most, xtol=1e-9 * (most - least))
    away = 1 - at * factors
    root = copysign(sqrt(max(0.0, 2 * float(sizes @ np.log(away)))), at)
    if abs(root) < 1e-5:  # In the middle, where the next line divides by 0.
        return 0.0
    return root + log(at * sqrt(float(weighted @ (factors / away**2))) / root) / root


@dataclass(frozen=True, slots=True)
class MeanBootstrap:
    """The mean over clusters by resampling these; of values without limits, such as logarithms."""

    values: ClusterSums
    seed: int = 0
    resamples: int = RESAMPLES

    def interval(self, level: float = 0.95) -> Interval | None:
        """The BCa interval, wider for few clusters (Hesterberg 2015, "What teachers should know").

        None for a single cluster. A one-sided bound of level p is the end of the interval of level
        2p - 1.
        """
        sums, counts, clusters = self.values.sums, self.values.counts, len(self.values.sums)
        spread, mean = np.ptp(sums - self.values.mean * counts), self.values.mean
        if clusters < 2:
            return None
        if spread <= 1e-9 * np.abs(sums).max():
            return Interval(mean, mean, level)
        reach = sqrt(clusters / (clusters - 1)) * stats.t.isf((1 - level) / 2, clusters - 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", stats.DegenerateDataWarning)
            low, high = stats.bootstrap(
                (sums, counts),
                lambda sums, counts, axis: sums.sum(axis) / counts.sum(axis),
                paired=True,
                vectorized=True,
                n_resamples=self.resamples,
                confidence_level=1 - 2 * float(stats.norm.sf(min(reach, 8.0))),  # Below 1.
                batch=max(1, _BATCH // clusters),
                rng=np.random.default_rng(self.seed),
            ).confidence_interval
        return Interval(float(low), float(high), level)


def score_ratio(first: Values, second: Values, level: float = 0.95) -> Interval | None:
    """Of the mean of `first` [n] over that of `second` [n], scores from 0 to 1, row by row.

    It ends where `first` less so many times `second` may just be 0 in the mean (Fieller 1954). None
    for a single row, and where no score of `second` is above 0.
    """
    one, other = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if len(one) < 2 or not other.any():
        return None

    def ends(times: float) -> tuple[float, float]:
        found = BoundedMean(sum_clusters(one - times * other), -times, 1.0).interval(level)
        assert found is not None  # There are two rows.
        return found.low, found.high

    most = next(2.0**power for power in count(1) if ends(2.0**power)[1] < 0)
    low = optimize.brentq(lambda times: ends(times)[0], 0.0, most)
    return Interval(low, optimize.brentq(lambda times: ends(times)[1], 0.0, most), level)


def mean_ratio(
    first: Values, second: Values, clusters: Names | None = None, level: float = 0.95
) -> Interval | None:
    """Of the mean of `first` [n] over that of `second` [n], row by row, of values without limits.

    It ends where `first` less so many times `second` may just be 0 in the mean, by Student's t
    (Fieller 1954). None for a single cluster, and where the mean of `second` may be 0.
    """
    one, other = (
        sum_clusters(np.asarray(values, np.float64), clusters) for values in (first, second)
    )
    number = len(one.sums)
    if number < 2:
        return None
    reach = float(stats.t.isf((1 - level) / 2, number - 1)) / float(one.counts.sum())
    rests = np.stack([one.sums - one.mean * one.counts, other.sums - other.mean * other.counts])
    spread = reach**2 * number / (number - 1) * (rests @ rests.T)
    least = other.mean**2 - spread[1, 1]
    if least <= 0:
        return None
    middle = (one.mean * other.mean - spread[0, 1]) / least
    half = sqrt(max(0.0, middle**2 - (one.mean**2 - spread[0, 0]) / least))
    return Interval(float(middle - half), float(middle + half), level)


@dataclass(frozen=True, slots=True)
class StudentMean:
    """A mean over clusters of one kind, or of several that cross, such as rows and repeats.

    `parts` have the standard error and the number of clusters of each kind.
    """

    mean: float
    parts: Sequence[tuple[float, int]]

    @classmethod
    def of(cls, *kinds: ClusterSums) -> "StudentMean":
        """Clusters of several sizes count by size (linearised); a single one has no error."""
        parts = []
        for values in kinds:
            clusters, spread = len(values.sums), values.sums - values.mean * values.counts
            total = clusters / max(clusters - 1, 1) * float((spread**2).sum())
            error = sqrt(total) / float(values.counts.sum()) if clusters > 1 else 0.0
            parts.append((error, clusters))
        return cls(kinds[0].mean, parts)

    @property
    def standard_error(self) -> float:
        """That of all kinds of clusters."""
        return hypot(*(error for error, _ in self.parts))

    @property
    def freedom(self) -> float:
        """Degrees of freedom of the standard error (Welch 1947)."""
        variances = [(error**2, clusters - 1) for error, clusters in self.parts if error]
        shares = sum(variance**2 / freedom for variance, freedom in variances)
        alone = len(self.parts) == 1 or not shares
        return float(self.parts[0][1] - 1) if alone else self.standard_error**4 / shares

    def interval(self, level: float = 0.95) -> Interval | None:
        """The two-sided interval; None for a single cluster."""
        if min(clusters for _, clusters in self.parts) < 2:
            return None
        reach = self._reach(1 - level)
        return Interval(self.mean - reach, self.mean + reach, level)

    @property
    def p(self) -> float:
        """Two-sided, of a mean of 0: of the widest interval without it; 1 for a single cluster."""
        distance, clusters = abs(self.mean), min(clusters for _, clusters in self.parts)
        if clusters < 2 or not distance:
            return 1.0
        if not self.standard_error:
            return 0.0
        if len(self.parts) == 1:
            return float(2 * stats.t.sf(distance / self.standard_error, clusters - 1))
        if self._reach(_LEAST_P) <= distance:
            return _LEAST_P
        return float(optimize.brentq(lambda p: self._reach(p) - distance, _LEAST_P, 1.0))

    def _reach(self, p: float) -> float:
        """Half of the interval that misses the truth with probability `p`."""
        reaches = (float(stats.t.isf(p / 2, n - 1)) * error for error, n in self.parts)
        return sqrt(sum(reach**2 for reach in reaches))


@dataclass(frozen=True, slots=True)
class Quantile:
    """The quantile `q` of `count` values, interpolated linearly between neighbours.

    None from fewer than `needed` values: it would be little else than the largest (or smallest)
    one. The interval is None where even the extreme values do not enclose the truth with its level.
    It is over requests, and over `repeats` of them where there are several.
    """

    q: float
    count: int
    needed: int
    value: float | None
    interval: Interval | None
    repeats: int = 1


def values_needed(q: float) -> int:
    """How many values have one beyond the quantile: 2 for a median, 10 for p90, 100 for p99."""
    # The division has rounding errors: 1 / (1 - 0.99) must be 100, not 101.
    return ceil(round(1 / min(q, 1 - q), 6))


def order_interval(count: int, q: float, level: float = 0.95) -> tuple[int, int] | None:
    """The ranks, from 1, of the two of `count` values that enclose the true quantile `q`.

    None where not even the extreme ones do.
    """
    tail = (1 - level) / 2
    # P(fewer than `low` values below the truth) <= tail, the same above.
    low = int(stats.binom.ppf(tail, count, q))
    high = int(stats.binom.isf(tail, count, q)) + 1
    return None if low < 1 or high > count else (low, high)


def quantile(
    values: Values, q: float, rows: Names | None = None, repeats: Names | None = None
) -> Quantile:
    """The quantile `q` of all `values` [n] with its interval.

    `rows` [n] are alike for values of one request, `repeats` [n] for those of one repeat; without
    these all values are independent. The interval is also None where one of several repeats has a
    quantile of 0, which is no time.
    """
    needed, count = values_needed(q), len(values)
    if count < needed:
        return Quantile(q, count, needed, None, None)
    array, groups = np.asarray(values, dtype=np.float64), dict[Hashable, list[float]]()
    for value, repeat in zip(values, repeats or [0] * count, strict=True):
        groups.setdefault(repeat, []).append(value)
    middle, several, effective = float(np.quantile(array, q)), len(groups) > 1, count
    if several:
        # So many independent values have a share below the quantile as sure as that of requests is:
        # at least as many as there are requests, and at most as many as there are values.
        share = StudentMean.of(sum_clusters((array <= middle).astype(np.float64), rows))
        single, variance = share.mean * (1 - share.mean), share.standard_error**2
        requests = share.parts[0][1]
        effective = count if single else requests
        if variance:
            effective = min(max(floor(single / variance), requests), count)
    ranks, interval = order_interval(effective, q), None
    if ranks is not None:
        # A rank of few is a share of all; both ends are moved outward.
        low = ((2 * ranks[0] - 1) * count + effective) // (2 * effective)
        high = -((-(2 * ranks[1] - 1) * count - effective) // (2 * effective))
        ordered = np.sort(array)
        ends = float(ordered[max(low, 1) - 1]), float(ordered[min(high, count) - 1])
        interval = Interval(*ends, 0.95)
    if several and interval is not None:
        own = np.array([np.quantile(group, q) for group in groups.values()])
        interval = _widened(interval, middle, own)
    return Quantile(q, count, needed, middle, interval, len(groups))


def _widened(ends: Interval, middle: float, own: Floats) -> Interval | None:
    """The interval of a quantile, `middle`, that is `own` [repeats] in each repeat.

    In logarithms: how far repeats let the quantile be, and the ends of requests.
    """
    if not (own > 0).all():
        return None
    between = StudentMean.of(sum_clusters(np.log(own))).interval(ends.level)
    reach = 0.0 if between is None else (between.high - between.low) / 2
    center = log(middle)
    down = center - (log(ends.low) if ends.low > 0 else -np.inf)
    low, high = (hypot(max(end, 0.0), reach) for end in (down, log(ends.high) - center))
    return Interval(exp(center - low), exp(center + high), ends.level)
