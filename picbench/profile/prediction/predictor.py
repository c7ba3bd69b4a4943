"""Times and memory of arms, predicted from a measured grid."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import mean, median
from typing import Any

import numpy as np

from picbench.engines.algorithms import Algorithm, Registry, Reuse
from picbench.grid.measured_grid import ALONE, BURST, ArmCell, GridPoint, MeasuredGrid
from picbench.profile.prediction.cost_model import (
    CostModel,
    InterpolationError,
    Observation,
    RequestShape,
    fit,
    leave_one_out,
)
from picbench.profile.trace_profile import ArmProfile, TraceProfile


@dataclass(frozen=True, slots=True)
class ArmPrediction:
    """An arm's figures for the requests of a trace.

    `ttft_s` is the median of requests alone, `requests_s` the most that the engine answers. At the
    trace's own rate requests also wait: `loaded_ttft_s` adds the mean wait of a queue, infinite
    where more come than are answered, None without times. `kv_gib` is held by the running requests.
    None is what the grid does not have. `inside` says whether the mean request is within the grid.
    """

    ttft_s: float | None
    requests_s: float | None
    loaded_ttft_s: float | None
    kv_gib: float
    inside: bool


@dataclass(frozen=True, slots=True)
class PredictorErrors:
    """How well the grid predicts points of itself that were left out."""

    ttft: InterpolationError | None
    requests_s: InterpolationError | None


class GridPredictor:
    """Predicts from the cells of one grid; arms of one kind share their costs.

    The kinds are arms that map chunks, and arms that compute whole prompts from some token on.
    """

    def __init__(self, grid: MeasuredGrid, block_bytes: int | None = None) -> None:
        self.grid = grid
        self._block_bytes = block_bytes or grid.facts.block_bytes
        self._registry = Registry()
        self._ttft = {linked: fit(list(self._alone(linked))) for linked in (False, True)}
        self._seconds = {linked: fit(list(self._burst(linked))) for linked in (False, True)}

    def predict(self, profile: TraceProfile, arm: ArmProfile) -> ArmPrediction:
        """The figures of an arm."""
        counted, traffic = arm.counted, profile.traffic
        requests = max(1, counted.requests)
        chunks = traffic.chunks / traffic.requests
        shape = RequestShape(
            prompt=counted.prompt / requests,
            computed=counted.computed / requests,
            chunks=chunks,
            output=traffic.output / traffic.requests,
        )
        kind = _links(arm.algorithm) and traffic.chunks > 0
        ttft, seconds = self._ttft[kind], self._seconds[kind]
        each = seconds.predict_each(arm.sizes, reply=True) if seconds else None
        service = None if each is None else float(each.mean())
        alone = float(np.median(ttft.predict_each(arm.sizes, reply=False))) if ttft else None
        return ArmPrediction(
            ttft_s=alone,
            requests_s=1 / service if service else None,
            loaded_ttft_s=_loaded(alone, each, traffic.rate),
            kv_gib=arm.peak_blocks * self._block_bytes / 2**30,
            inside=_covers(ttft, replace(shape, output=0.0)) and _covers(seconds, shape),
        )

    def errors(self) -> PredictorErrors:
        """Leave-one-out errors of both times, over the arms of both kinds."""
        return PredictorErrors(
            leave_one_out([list(self._alone(linked)) for linked in (False, True)]),
            leave_one_out([list(self._burst(linked)) for linked in (False, True)]),
        )

    def _alone(self, linked: bool) -> Iterator[Observation]:
        for point, arms in self._observed(ALONE, linked):
            shape = replace(_mean_shape(arms, point.chunks), output=0.0)
            yield Observation(_traffic(point), shape, median(arm.ttft_s for arm in arms))

    def _burst(self, linked: bool) -> Iterator[Observation]:
        for point, arms in self._observed(BURST, linked):
            seconds = 1 / median(arm.requests_s for arm in arms)
            yield Observation(_traffic(point), _mean_shape(arms, point.chunks), seconds)

    def _observed(self, load: str, linked: bool) -> Iterator[tuple[GridPoint, list[ArmCell]]]:
        """Each point of a load, and the repeats of each arm of a kind in it."""
        for point, cells in self.grid.points().items():
            if point.load != load:
                continue
            for arm in self.grid.arms:
                repeats = [cell.arms[arm] for cell in cells if arm in cell.arms]
                if repeats and _links(self._registry.parse(arm)) is linked:
                    yield point, repeats


def _links(algorithm: Algorithm) -> bool:
    return algorithm.reuse is Reuse.CHUNKS


def _traffic(point: GridPoint) -> GridPoint:
    """What is left out together: a point with a cold and a warm cache."""
    return replace(point, cache="cold")


def _mean_shape(arms: Sequence[ArmCell], chunks: float) -> RequestShape:
    return RequestShape(
        prompt=mean(arm.prompt for arm in arms),
        computed=mean(arm.computed for arm in arms),
        chunks=chunks,
        output=mean(arm.output for arm in arms),
    )


def _covers(model: CostModel | None, shape: RequestShape) -> bool:
    return model is not None and model.covers(shape)


def _loaded(alone: float | None, each: Any, rate: float | None) -> float | None:
    """TTFT with the mean wait of a queue with random arrivals (M/G/1, Pollaczek-Khinchine).

    `each` are the service times.
    """
    if alone is None or each is None or rate is None:
        return None
    used = rate * float(each.mean())
    return inf if used >= 1 else alone + rate * float((each**2).mean()) / (2 * (1 - used))
