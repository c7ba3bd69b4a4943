"""Differences and ratios of two arms on the same rows, each row a cluster of its own.

Rows are drawn with replacement, each with the scores of both arms, so that rows that are hard for
both do not widen an interval.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from picbench.statistics.bootstrap import RESAMPLES, MeanBootstrap
from picbench.statistics.clusters import sum_clusters


@dataclass(frozen=True, slots=True)
class RowInterval:
    """An estimate, and where 95 % of its resamples are."""

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


class RatioBootstrap:
    """Ratios of means over the same resamples of so many `rows`, for all arms of a data set."""

    def __init__(self, rows: int, seed: int = 0) -> None:
        draw = np.random.default_rng(seed)
        #: Share of each row in each resample: [resamples, rows].
        self._shares = draw.multinomial(rows, np.full(rows, 1 / rows), size=RESAMPLES) / rows

    def ratio(self, first: Sequence[float], second: Sequence[float]) -> RowInterval:
        """Mean of `first` over that of `second`, which is not zero in any resample."""
        value = float(np.mean(first) / np.mean(second))
        resamples = (self._shares @ first) / (self._shares @ second)
        low, high = np.quantile(resamples, (0.025, 0.975))
        # Sums in another order differ in their last place.
        return RowInterval(value, round(float(low), 9), round(float(high), 9))
