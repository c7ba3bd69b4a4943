"""Differences and ratios of two arms on the same rows, each row a cluster of its own.

Rows are drawn with replacement, each with the scores of both arms, so that rows that are hard for
both do not widen an interval.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from picbench.statistics.bootstrap import MeanBootstrap
from picbench.statistics.clusters import ratio_of_sums, sum_clusters


@dataclass(frozen=True, slots=True)
class RowInterval:
    """An estimate and its interval of 95 %."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"

    @property
    def signed(self) -> str:
        """With signs, for differences."""
        return f"{self.value:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def difference_of(first: Sequence[float], second: Sequence[float]) -> RowInterval:
    """Mean of `first` less that of `second`, with its BCa interval. Needs two rows."""
    differences = np.subtract(first, second)
    found = MeanBootstrap(sum_clusters(differences, None)).interval()
    if found is None:
        raise ValueError("one row has no interval")
    return RowInterval(float(differences.mean()), found.low, found.high)


def ratio_of(first: Sequence[float], second: Sequence[float]) -> RowInterval | None:
    """Mean of `first` over that of `second`, above 0, with its BCa interval. Needs two rows.

    None where a resample has nothing to divide by.
    """
    rows = ratio_of_sums(first, second)
    found = MeanBootstrap(rows).interval()
    return RowInterval(rows.mean, found.low, found.high) if found else None
