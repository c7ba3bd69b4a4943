"""Differences and ratios of two arms on the same rows, each with its interval."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from picbench.statistics.clusters import ratio_of_sums
from picbench.statistics.row_means import difference_interval, ratio_interval


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
    found = difference_interval(first, second)
    return RowInterval(float(np.subtract(first, second).mean()), found.low, found.high)


def ratio_of(first: Sequence[float], second: Sequence[float]) -> RowInterval | None:
    """Mean of `first` over that of `second`, above 0, with its BCa interval. Needs two rows.

    None where a resample has nothing to divide by.
    """
    found = ratio_interval(first, second)
    return RowInterval(ratio_of_sums(first, second).mean, found.low, found.high) if found else None
