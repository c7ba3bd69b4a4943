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
    """

    q: float
    count: int
    needed: int
    value: float | None
    interval: Interval | None


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
    return Quantile(q, count, needed, float(np.quantile(ordered, q)), _interval(ordered, q, level))


def _interval(
    ordered: np.ndarray[tuple[int], np.dtype[np.float64]], q: float, level: float
) -> Interval | None:
    count, tail = len(ordered), (1 - level) / 2
    # P(fewer than `low` values below the truth) <= tail, the same above.
    low = int(stats.binom.ppf(tail, count, q))
    high = int(stats.binom.isf(tail, count, q)) + 1
    if low < 1 or high > count:
        return None
    return Interval(float(ordered[low - 1]), float(ordered[high - 1]), level)
