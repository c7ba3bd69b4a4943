"""Quantiles of requests that were served several times: intervals over requests and repeats.

Requests of one repeat share the machine's state of that minute, and the same request recurs in
every repeat: three repeats of 100 requests are neither 300 requests nor 100 states. Taken as
independent, their order statistics covered 57 % where they said 95 % (repeats that differ by 10 %,
requests by 40 %).

Two parts of the interval are made apart, and their lengths added as squares, on either side of the
estimate (MOVER: Zou, Donner, "Construction of confidence limits about effect measures", Statistics
in Medicine 27, 2008):

- of requests: order statistics of as many independent values as clusters of rows are worth
  (Woodruff, JASA 47, 1952, by the effective sample size of Korn, Graubard, "Confidence intervals
  for proportions", Survey Methodology 24, 1998);
- of repeats: Student's t of the logarithms of each repeat's quantile (Ibragimov, Mueller 2010; see
  `picbench.statistics.student`). Resampled repeats would be too much alike: of three draws from
  three, one in nine has all the same (Owen, "The pigeonhole bootstrap", Annals of Applied
  Statistics 1, 2007, is about many of both).

What is noise in one request of one repeat is in both parts, so that intervals are too wide where
neither requests nor repeats differ otherwise (Cameron, Gelbach, Miller, "Robust Inference With
Multiway Clustering", J. of Business & Economic Statistics 29, 2011, take it off once; what is left
may then be negative). Of tails they are too narrow where repeats differ more than requests do: a
slow minute that no repeat met is in no interval.
"""

from collections.abc import Hashable, Sequence
from math import exp, floor, hypot, log

import numpy as np

from picbench.statistics.bootstrap import Interval
from picbench.statistics.clusters import Floats, sum_clusters
from picbench.statistics.quantiles import Quantile, order_interval, quantile
from picbench.statistics.student import StudentMean


def repeated_quantile(
    values: Sequence[float],
    q: float,
    rows: Sequence[Hashable],
    repeats: Sequence[Hashable],
    level: float = 0.95,
) -> Quantile:
    """The quantile `q` of all `values` [n] with its interval.

    `rows` [n] are alike for values of one request, `repeats` [n] for those of one repeat. Of a
    single repeat it is what `quantile` gives. The interval is also None where a repeat has a
    quantile of 0, which is no time.
    """
    found, distinct = quantile(values, q, level), len(set(repeats))
    if distinct < 2 or found.value is None:
        return found
    array = np.asarray(values, dtype=np.float64)
    served = _of_requests(array, found.value, q, rows, level)
    reach = _of_repeats(array, q, repeats, level)
    interval = None
    if served is not None and reach is not None:
        middle = log(found.value)
        down, up = middle - _log(served.low), _log(served.high) - middle
        interval = Interval(
            exp(middle - hypot(max(down, 0.0), reach)),
            exp(middle + hypot(max(up, 0.0), reach)),
            level,
        )
    return Quantile(q, found.count, found.needed, found.value, interval, distinct)


def _of_requests(
    values: Floats, middle: float, q: float, rows: Sequence[Hashable], level: float
) -> Interval | None:
    """The interval given these repeats: from the ranks of an effective number of values."""
    count, ordered = len(values), np.sort(values)
    effective = _effective(values <= middle, rows)
    ranks = order_interval(effective, q, level)
    if ranks is None:
        return None
    # A rank of few is a share of all; both ends are moved outward.
    low = floor((ranks[0] - 0.5) / effective * count + 0.5)
    high = -floor(-((ranks[1] - 0.5) / effective * count + 0.5))
    return Interval(float(ordered[max(low, 1) - 1]), float(ordered[min(high, count) - 1]), level)


def _effective(below: np.ndarray[tuple[int], np.dtype[np.bool_]], rows: Sequence[Hashable]) -> int:
    """How many independent values have a share as sure as that of `below` [n] in clusters.

    At least as many as there are rows, and at most as many as there are values.
    """
    share = StudentMean.of(sum_clusters(below.astype(np.float64), rows))
    variance, single = share.standard_error**2, share.mean * (1 - share.mean)
    if not variance:
        return len(below) if single else share.clusters
    return min(max(floor(single / variance), share.clusters), len(below))


def _of_repeats(
    values: Floats, q: float, repeats: Sequence[Hashable], level: float
) -> float | None:
    """How far repeats let the logarithm of the quantile be from the estimate."""
    groups: dict[Hashable, list[float]] = {}
    for value, repeat in zip(values.tolist(), repeats, strict=True):
        groups.setdefault(repeat, []).append(value)
    found = np.array([np.quantile(group, q) for group in groups.values()])
    if (found <= 0).any():
        return None
    interval = StudentMean.of(sum_clusters(np.log(found))).interval(level)
    return None if interval is None else interval.half_width


def _log(value: float) -> float:
    return log(value) if value > 0 else -np.inf
