"""Interpolation between measured cells: a cost per request, fitted to all of them.

Seconds of a request are a sum of costs that cannot be negative: a constant, the tokens that are
computed, those times the tokens that they attend to, the length of the prompt, its chunks, and the
reply. The sum is fitted to relative errors (Lawson and Hanson's non-negative least squares), so
that short requests count as much as long ones. How well that interpolates is measured by leaving
out one point of the grid after another (`leave_one_out`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import nnls  # type: ignore[import-untyped]

from picbench.profile.prediction.request_sizes import RequestSizes

#: Costs that are fitted, and how many requests more than that are needed at least.
_COSTS, _SPARE = 6, 2


@dataclass(frozen=True, slots=True)
class RequestShape:
    """A request on average: tokens of its prompt, those computed, chunks, tokens of its reply."""

    prompt: float
    computed: float
    chunks: float
    output: float

    def costs(self) -> tuple[float, ...]:
        """What each cost is multiplied by."""
        computed, prompt = self.computed / 1e3, self.prompt / 1e3
        return 1.0, computed, computed * prompt, prompt, self.chunks, self.output


@dataclass(frozen=True, slots=True)
class Observation:
    """A measured value for a request; observations of one `group` are left out together."""

    group: object
    shape: RequestShape
    value: float


@dataclass(frozen=True, slots=True)
class CostModel:
    """Costs that were fitted, and the range of the requests that they were fitted to."""

    costs: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]

    def predict(self, shape: RequestShape) -> float:
        """The value for a request."""
        return float(np.dot(self.costs, shape.costs()))

    def predict_each(self, sizes: RequestSizes, *, reply: bool) -> "np.ndarray[Any, Any]":
        """The value for each request, with the cost of its `reply` or without."""
        found: np.ndarray[Any, Any] = sizes.costs(reply=reply) @ np.array(self.costs)
        return found

    def covers(self, shape: RequestShape) -> bool:
        """Whether the request is within what was measured, in every respect."""
        found = zip(self.low, _shape(shape), self.high, strict=True)
        return all(low * 0.99 <= value <= high * 1.01 for low, value, high in found)


def fit(observations: Sequence[Observation]) -> CostModel | None:
    """Fit costs; None for too few different requests."""
    shapes = {observation.shape for observation in observations}
    if len(shapes) < _COSTS + _SPARE:
        return None
    weights = np.array([1 / observation.value for observation in observations])
    matrix = np.array([observation.shape.costs() for observation in observations])
    scale = matrix.max(axis=0)
    scale[scale == 0] = 1.0
    costs, _ = nnls(matrix / scale * weights[:, None], np.ones(len(observations)))
    ranges = np.array([_shape(shape) for shape in shapes])
    return CostModel(
        tuple(map(float, costs / scale)),
        tuple(map(float, ranges.min(axis=0))),
        tuple(map(float, ranges.max(axis=0))),
    )


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
            errors += [abs(model.predict(o.shape) / o.value - 1) for o in own]
            left_out += 1
    if not errors:
        return None
    middle, p90 = np.quantile(errors, (0.5, 0.9))
    within = float(np.mean([error <= 0.15 for error in errors]))
    return InterpolationError(float(middle), float(p90), within, left_out)


def _shape(shape: RequestShape) -> tuple[float, ...]:
    return shape.prompt, shape.computed, shape.chunks, shape.output
