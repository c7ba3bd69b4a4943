"""Quantiles with intervals, from order statistics, and none from too few values.

The number of values below the true quantile is binomial, whatever the distribution; two order
statistics therefore enclose it with a known probability (David, Nagaraja, "Order Statistics",
section 7.1).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

from picbench.statistics.bootstrap import Interval


@dataclass(frozen=True, slots=True)
class Quantile:
    """The quantile `q` of `count` values, interpolated linearly between neighbours.

    None from fewer than `needed` values: it would be little else than the largest (or smallest)
    one. The interval is None where even the extreme values do not enclose the truth with its level.
    It is over requests, and over `repeats` of them where there are several
    (`picbench.statistics.repeated_quantiles`).
    """

    q: float
    count: int
    needed: int
    value: float | None
    interval: Interval | None
    repeats: int = 1


def values_needed(q: float) -> int:
    """How many values have one beyond the quantile: 2 for a median, 10 for p90, 100 for p99."""
    if not 0 < q < 1:
        raise ValueError("a quantile is between 0 and 1")
    # The division has rounding errors: 1 / (1 - 0.99) must be 100, not 101.
    return ceil(round(1 / min(q, 1 - q), 6))


def quantile(values: Sequence[float], q: float, level: float = 0.95) -> Quantile:
    """The quantile `q` with its interval."""
    needed, count = values_needed(q), len(values)
    if count < needed:
        return Quantile(q, count, needed, None, None)
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    ranks, interval = order_interval(count, q, level), None
    if ranks is not None:
        interval = Interval(float(ordered[ranks[0] - 1]), float(ordered[ranks[1] - 1]), level)
    return Quantile(q, count, needed, float(np.quantile(ordered, q)), interval)


def order_interval(count: int, q: float, level: float = 0.95) -> tuple[int, int] | None:
    """The ranks, from 1, of the two of `count` values that enclose the true quantile `q`.

    None where not even the extreme ones do.
    """
    tail = (1 - level) / 2
    # P(fewer than `low` values below the truth) <= tail, the same above.
    low = int(stats.binom.ppf(tail, count, q))
    high = int(stats.binom.isf(tail, count, q)) + 1
    return None if low < 1 or high > count else (low, high)
