"""Interpolation between measured cells: costs, fitted to all of them.

A time is a sum of costs that cannot be negative, each multiplied by how often it is paid: requests,
computed tokens, what these attend to, chunks, steps, generated tokens. The sum is fitted to
relative errors (Lawson and Hanson's non-negative least squares), so that short times count as much
as long ones, and errors beyond the usual ones count less the larger they are (Huber's weights),
because another program on the machine makes a cell several times as long. How well that
interpolates is measured by leaving out one point of the grid after another (`leave_one_out`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import nnls  # type: ignore[import-untyped]

#: How many different observations more than costs are needed at least.
_SPARE = 2

#: Huber's constant: errors beyond so many of their usual size count less.
_USUAL = 1.345

#: Relative errors below this one are never unusual, and how often weights are made anew.
_LEAST, _ROUNDS = 0.01, 20

_Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Observation:
    """A measured value, and what each cost of it is multiplied by.

    Observations of one `group` are left out together. `sizes` are compared with those of what is
    predicted.
    """

    group: object
    counts: tuple[float, ...]
    value: float
    sizes: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class CostModel:
    """Costs that were fitted, and the range of the sizes that they were fitted to."""

    costs: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]

    def predict(self, counts: Sequence[float]) -> float:
        """The value, of what each cost is multiplied by."""
        return float(np.dot(self.costs, counts))

    def covers(self, sizes: Sequence[float]) -> bool:
        """Whether sizes are within what was measured, in every respect."""
        found = zip(self.low, sizes, self.high, strict=True)
        return all(low * 0.99 <= value <= high * 1.01 for low, value, high in found)


def fit(observations: Sequence[Observation]) -> CostModel | None:
    """Fit costs; None for too few different observations."""
    different = {observation.counts for observation in observations}
    if not different or len(different) < _varied(different) + _SPARE:
        return None
    values = np.array([observation.value for observation in observations])
    matrix = np.array([observation.counts for observation in observations]) / values[:, None]
    scale = matrix.max(axis=0)
    scale[scale == 0] = 1.0
    costs = _robust(matrix / scale) / scale
    sizes = np.array([observation.sizes for observation in observations])
    return CostModel(
        tuple(map(float, costs)),
        tuple(map(float, sizes.min(axis=0))),
        tuple(map(float, sizes.max(axis=0))),
    )


def _varied(different: set[tuple[float, ...]]) -> int:
    """How many costs there is anything to learn of."""
    return int(np.array(list(different)).any(axis=0).sum())


def _robust(matrix: _Array) -> _Array:
    """Costs that make each row 1, but for rows that no costs of the others make nearly so."""
    weights = np.ones(len(matrix))
    costs: _Array = np.zeros(matrix.shape[1])
    for _ in range(_ROUNDS):
        before = costs
        costs, _ = nnls(matrix * weights[:, None], weights)
        errors = np.abs(matrix @ costs - 1)
        usual = max(_USUAL * 1.4826 * float(np.median(errors)), _LEAST)
        weights = np.sqrt(usual / np.maximum(errors, usual))
        if np.allclose(costs, before, rtol=1e-6, atol=0):
            break
    return costs


@dataclass(frozen=True, slots=True)
class InterpolationError:
    """Relative errors for points that were left out: median, 90th percentile, share within 15 %."""

    median: float
    p90: float
    within: float
    points: int

    def __str__(self) -> str:
        return (
            f"median {self.median:.0%}, 90 % below {self.p90:.0%}, {self.within:.0%} within 15 % "
            f"({self.points} points)"
        )


def leave_one_out(kinds: Sequence[Sequence[Observation]]) -> InterpolationError | None:
    """Predict each group of each kind from all others of the kind; None for too few of them."""
    errors: list[float] = []
    left_out = 0
    for observations in kinds:
        groups = list(dict.fromkeys(observation.group for observation in observations))
        for group in groups:
            model = fit([o for o in observations if o.group != group])
            if model is None:
                continue
            own = [o for o in observations if o.group == group]
            errors += [abs(model.predict(o.counts) / o.value - 1) for o in own]
            left_out += 1
    if not errors:
        return None
    middle, p90 = np.quantile(errors, (0.5, 0.9))
    within = float(np.mean([error <= 0.15 for error in errors]))
    return InterpolationError(float(middle), float(p90), within, left_out)
