"""The median of many requests alone, whose times scatter around their usual ones.

Where half of a trace's requests take about 15 ms and the others 20, the median is of the quickest
of the latter: not a usual one of these. So it is the median of all requests with their scatter, not
the median of their usual times.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.optimize import brentq  # type: ignore[import-untyped]
from scipy.special import ndtr  # type: ignore[import-untyped]

from picbench.profile.prediction.cell_spread import CellSpread

#: The 95th percentile of a normal distribution, in standard deviations.
_P95 = 1.6449

#: How far apart the mean and the middle request of a cell may be if all requests are alike, as a
#: share, and in tokens.
_ALIKE, _TOKENS = 0.02, 2.0

#: Below all scatter that was measured.
_LEAST = 1e-4

_Array = np.ndarray[Any, np.dtype[np.float64]]


def alike(computed: float, middle: float) -> bool:
    """Whether all requests of a cell compute about as much, by their mean and the middle one."""
    return abs(middle - computed) <= _ALIKE * computed + _TOKENS


def deviations(tails: CellSpread | None, computed: Sequence[float]) -> _Array:
    """Standard deviations of the logarithms of times, for requests of so many tokens [requests].

    `tails` are 95th percentiles over medians, of cells of like requests; without, there are none.
    """
    if tails is None:
        return np.zeros(len(computed))
    different, places = np.unique(np.asarray(computed, np.float64), return_inverse=True)
    found = np.array([max(tails.middle(size), 1.0) for size in different.tolist()])
    each: _Array = (np.log(found) / _P95)[places]
    return each


def scattered_median(usual: Sequence[float], scatter: _Array) -> float:
    """The median of requests whose times are lognormal around the `usual` ones [requests].

    `scatter` [requests] are their `deviations`.
    """
    times = np.asarray(usual, np.float64)
    if not scatter.any() or times.min() <= 0:
        return float(np.median(times))
    logs, scatter = np.log(times), np.maximum(scatter, _LEAST)

    def above_half(log: float) -> float:
        return float(ndtr((log - logs) / scatter).mean()) - 0.5

    ends = float(logs.min()) - 1.0, float(logs.max()) + 1.0
    return float(np.exp(brentq(above_half, *ends, xtol=1e-6)))
