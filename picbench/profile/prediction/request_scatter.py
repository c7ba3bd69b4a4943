"""How far requests alone lie from their usual time, and what that does to the median of many.

Where half of a trace's requests take about 15 ms and the others 20, the median is of the quickest
of the latter: not a usual one of these. So it is the median of all requests with their scatter, not
the median of their usual times.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import brentq  # type: ignore[import-untyped]
from scipy.special import ndtr  # type: ignore[import-untyped]

#: The 95th percentile of a normal distribution, in standard deviations.
_P95 = 1.6449

#: Scatter is the median of so many cells whose requests compute about as many tokens.
_NEAREST = 20

#: How far apart the mean and the middle request of a cell may be if all requests are alike, as a
#: share, and in tokens.
_ALIKE, _TOKENS = 0.02, 2.0

#: Below all scatter that was measured.
_LEAST = 1e-4

_Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class RequestScatter:
    """Standard deviations of logarithms of times, `deviations` [cells], by computed tokens.

    `sizes` [cells] are logarithms of these.
    """

    sizes: _Array
    deviations: _Array

    @classmethod
    def of(cls, cells: Iterable[tuple[float, float, float]]) -> "RequestScatter":
        """Of computed tokens, median and 95th percentile of the times of cells of like requests."""
        found = np.array(list(cells), dtype=np.float64).reshape(-1, 3)
        deviations = np.log(np.maximum(found[:, 2] / found[:, 1], 1.0)) / _P95
        return cls(np.log(np.maximum(found[:, 0], 1.0)), deviations)

    def around(self, computed: Sequence[float]) -> _Array:
        """The standard deviation for each number of tokens; none where too few cells tell."""
        sizes = np.log(np.maximum(np.asarray(computed, np.float64), 1.0))
        if len(self.sizes) < _NEAREST:
            return np.zeros(len(sizes))
        different, places = np.unique(sizes, return_inverse=True)
        found = np.array([self._at(size) for size in different])
        return found[places]

    def _at(self, size: float) -> float:
        nearest = np.argsort(np.abs(self.sizes - size), kind="stable")[:_NEAREST]
        return float(np.median(self.deviations[nearest]))


def alike(computed: float, middle: float) -> bool:
    """Whether all requests of a cell compute about as much, by their mean and the middle one."""
    return abs(middle - computed) <= _ALIKE * computed + _TOKENS


def scattered_median(usual: Sequence[float], deviations: _Array) -> float:
    """The median of requests whose times are lognormal around the `usual` ones [requests].

    `deviations` [requests] are those of `RequestScatter.around`.
    """
    times = np.asarray(usual, np.float64)
    if not deviations.any() or times.min() <= 0:
        return float(np.median(times))
    logs, scatter = np.log(times), np.maximum(deviations, _LEAST)
    lowest, highest = float(logs.min()) - 1.0, float(logs.max()) + 1.0

    def above_half(log: float) -> float:
        return float(ndtr((log - logs) / scatter).mean()) - 0.5

    return float(np.exp(brentq(above_half, lowest, highest, xtol=1e-6)))
