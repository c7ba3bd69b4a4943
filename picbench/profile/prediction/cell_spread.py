"""How far single cells lie from what is fitted to all cells of a grid.

Cells of few computed tokens lie farther: the host decides how long they take, and hosts differ. So
a prediction has the spread of the cells whose requests compute about as much.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from picbench.statistics.quantiles import order_interval

#: The share of cells that a range covers.
COVERED = 0.9

#: Of cells that are about as large: their share of all, and how many a range needs at least. A
#: median does with fewer, so that it is of one size in a calibration of minutes as well.
_NEAREST, _FEWEST, _FEWEST_OF_MEDIAN = 1 / 3, 20, 7

_Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class CellSpread:
    """Measured over fitted values, `ratios` [cells], by computed tokens of a request.

    `sizes` [cells] are logarithms of these.
    """

    sizes: _Array
    ratios: _Array

    @classmethod
    def of(cls, cells: Iterable[tuple[float, float]]) -> "CellSpread | None":
        """Of computed tokens and ratio of each cell; None of too few cells."""
        found = np.array(list(cells), dtype=np.float64).reshape(-1, 2)
        if len(found) < _FEWEST:
            return None
        return cls(np.log(np.maximum(found[:, 0], 1.0)), found[:, 1])

    def around(self, value: float, computed: float) -> tuple[float, float]:
        """Where a single measurement of a fitted `value` would be, for so many tokens."""
        edges = ((1 - COVERED) / 2, (1 + COVERED) / 2)
        low, high = np.quantile(self._nearest(computed, _FEWEST), edges)
        return float(value * low), float(value * high)

    def around_median(
        self, times: Sequence[float], computed: Sequence[float]
    ) -> tuple[float, float]:
        """Where a measured median of requests with these fitted `times` would be.

        Few requests of few sizes have a median that jumps from one size to the next; so it is
        between those of the requests that enclose the median of such traffic.
        """
        low, high = order_interval(len(times), 0.5, COVERED) or (1, len(times))
        ordered, middle = sorted(times), float(np.median(computed))
        least, most = (self.around(ordered[rank - 1], middle) for rank in (low, high))
        return least[0], most[1]

    def middle(self, computed: float) -> float:
        """The median ratio for so many tokens."""
        return float(np.median(self._nearest(computed, _FEWEST_OF_MEDIAN)))

    def _nearest(self, computed: float, fewest: int) -> _Array:
        count = max(fewest, round(_NEAREST * len(self.sizes)))
        apart = np.abs(self.sizes - np.log(max(computed, 1.0)))
        nearest: _Array = self.ratios[apart <= np.partition(apart, count - 1)[count - 1]]
        return nearest
