"""Means of two measurements of the same rows, each row a cluster of its own: BCa intervals.

Rows are drawn with replacement, each with both of its values, so that rows that are hard for both
do not widen an interval.
"""

from collections.abc import Sequence

import numpy as np

from picbench.statistics.bootstrap import Interval, MeanBootstrap
from picbench.statistics.clusters import ratio_of_sums, sum_clusters


def difference_interval(
    first: Sequence[float],
    second: Sequence[float],
    level: float = 0.95,
    resamples: int | None = None,
) -> Interval:
    """Of the mean of `first` less that of `second`. Raises ValueError for less than two rows."""
    differences = sum_clusters(np.subtract(first, second))
    found = MeanBootstrap(differences, resamples=resamples).interval(level)
    if found is None:
        raise ValueError("one row has no interval")
    return found


def ratio_interval(
    first: Sequence[float],
    second: Sequence[float],
    level: float = 0.95,
    resamples: int | None = None,
) -> Interval | None:
    """Of the mean of `first` over that of `second`, above 0; at least two rows.

    None where a resample has nothing to divide by.
    """
    return MeanBootstrap(ratio_of_sums(first, second), resamples=resamples).interval(level)
