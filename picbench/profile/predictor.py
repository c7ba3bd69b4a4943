"""Times and memory of arms, predicted from a measured grid.

A time is a sum of costs that cannot be negative, each multiplied by a factor: requests, computed
tokens, the tokens that these attend to, chunks, steps, generated tokens. The sum is fitted to
relative errors (Lawson and Hanson's non-negative least squares), so that short times count as much
as long ones, and errors beyond the usual ones count less the larger they are (Huber's weights),
because another program on the machine makes a cell several times as long. How well that
interpolates is measured by leaving out one point of the grid after another (`leave_one_out`).
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from math import inf
from statistics import fmean, median
from typing import Any

import numpy as np
from scipy.optimize import brentq, nnls  # type: ignore[import-untyped]
from scipy.special import ndtr  # type: ignore[import-untyped]

from picbench.engines.algorithms import Registry
from picbench.errors import ConfigError
from picbench.profile.grid import (
    ALONE,
    BURST,
    QUIET,
    ArmCell,
    GridPoint,
    MeasuredGrid,
    links_chunks,
)
from picbench.profile.profile import (
    ArmProfile,
    LoopCounts,
    RequestSize,
    TraceProfile,
    mean_size,
    serve_loop,
)
from picbench.statistics.intervals import order_interval

#: How many different observations more than costs are needed at least.
_SPARE = 2

#: Huber's constant: errors beyond so many of their usual size count less. Relative errors below the
#: least are never unusual, and weights are made anew so often.
_USUAL, _LEAST, _ROUNDS = 1.345, 0.01, 20

#: The share of cells that a range covers, and its ends.
COVERED = 0.9
_EDGES = ((1 - COVERED) / 2, (1 + COVERED) / 2)

#: Cells that are about as large: their share of all, and how many a range needs at least. A median
#: does with fewer, so that it is of one size in a calibration of minutes as well.
_NEAREST, _FEWEST, _FEWEST_OF_MEDIAN = 1 / 3, 20, 7

#: The 95th percentile of a normal distribution, in standard deviations.
_P95 = 1.6449

#: The largest distance of the mean and the middle request of a cell whose requests are all alike,
#: as a share, and in tokens.
_ALIKE, _ALIKE_TOKENS = 0.02, 2.0

#: Below all scatter that was measured.
_LEAST_SCATTER = 1e-4

_Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Observation:
    """A measured value, and the factor of each of its costs.

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
        """The sum of the costs, each multiplied by its factor."""
        return float(np.dot(self.costs, counts))

    def covers(self, sizes: Sequence[float]) -> bool:
        """Whether sizes are within what was measured, in every respect."""
        found = zip(self.low, sizes, self.high, strict=True)
        return all(low * 0.99 <= value <= high * 1.01 for low, value, high in found)


def fit(observations: Sequence[Observation]) -> CostModel | None:
    """Fit costs; None for too few different observations."""
    different = np.array(list({observation.counts for observation in observations}))
    if not observations or len(different) < different.any(axis=0).sum() + _SPARE:
        return None
    values = np.array([observation.value for observation in observations])
    matrix = np.array([observation.counts for observation in observations]) / values[:, None]
    scale = matrix.max(axis=0)
    scale[scale == 0] = 1.0
    matrix /= scale
    # Costs that make each row 1, except rows that no costs of the others make nearly so.
    weights, costs = np.ones(len(matrix)), np.zeros(matrix.shape[1])
    for _ in range(_ROUNDS):
        before = costs
        costs, _ = nnls(matrix * weights[:, None], weights)
        errors = np.abs(matrix @ costs - 1)
        usual = max(_USUAL * 1.4826 * float(np.median(errors)), _LEAST)
        weights = np.sqrt(usual / np.maximum(errors, usual))
        if np.allclose(costs, before, rtol=1e-6, atol=0):
            break
    sizes = np.array([observation.sizes for observation in observations])
    found = (costs / scale, sizes.min(axis=0), sizes.max(axis=0))
    return CostModel(*(tuple(map(float, numbers)) for numbers in found))


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


def leave_one_out(kinds: Iterable[Sequence[Observation]]) -> InterpolationError | None:
    """Predict each group of each kind from all others of the kind; None for too few of them."""
    errors: list[float] = []
    left_out = 0
    for observations in kinds:
        for group in dict.fromkeys(observation.group for observation in observations):
            model = fit([o for o in observations if o.group != group])
            if model is None:
                continue
            own = [o for o in observations if o.group == group]
            errors += [abs(model.predict(o.counts) / o.value - 1) for o in own]
            left_out += 1
    if not errors:
        return None
    middle, p90 = map(float, np.quantile(errors, (0.5, 0.9)))
    within = float(np.mean([error <= 0.15 for error in errors]))
    return InterpolationError(middle, p90, within, left_out)


@dataclass(frozen=True, slots=True)
class CellSpread:
    """Measured over fitted values, `ratios` [cells], by computed tokens of a request.

    `sizes` [cells] are logarithms of these.
    """

    sizes: _Array
    ratios: _Array

    @classmethod
    def of(cls, cells: Iterable[tuple[float, float]]) -> "CellSpread | None":
        """The spread of cells with these computed tokens and ratios; None for too few cells."""
        found = np.array(list(cells), dtype=np.float64).reshape(-1, 2)
        if len(found) < _FEWEST:
            return None
        return cls(np.log(np.maximum(found[:, 0], 1.0)), found[:, 1])

    def around(self, value: float, computed: float) -> tuple[float, float]:
        """Where a single measurement of a fitted `value` would be, for so many tokens."""
        low, high = np.quantile(self._nearest(computed, _FEWEST), _EDGES)
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


def alike(computed: float, middle: float) -> bool:
    """Whether all requests of a cell compute about as much, by their mean and the middle one."""
    return abs(middle - computed) <= _ALIKE * computed + _ALIKE_TOKENS


def deviations(tails: CellSpread | None, computed: Sequence[float]) -> _Array:
    """Standard deviations of the logarithms of times, for requests of so many tokens [requests].

    `tails` are 95th percentiles over medians, of cells whose requests are alike; without them the
    deviations are 0.
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
    logs, scatter = np.log(times), np.maximum(scatter, _LEAST_SCATTER)

    def above_half(log: float) -> float:
        return float(ndtr((log - logs) / scatter).mean()) - 0.5

    ends = float(logs.min()) - 1.0, float(logs.max()) + 1.0
    return float(np.exp(brentq(above_half, *ends, xtol=1e-6)))


@dataclass(frozen=True, slots=True)
class ArmPrediction:
    """An arm's figures for the requests of a trace.

    `ttft_s` is the median of requests alone, `requests_s` are answered when as many run at a time
    as the profile says. At the trace's own rate requests also wait: `loaded_ttft_s` adds the mean
    wait of a queue, infinite where more come than are answered, None without times. `kv_gib` is
    held by the running requests. None is what the grid does not have. `inside` says whether the
    mean request is within the grid. Ranges are those in which 90 % of single cells of the grid lie
    around what is fitted to them, for requests that compute about as much; that of `ttft_s` is
    around the medians that 90 % of as many requests of such traffic have.
    """

    ttft_s: float | None
    requests_s: float | None
    loaded_ttft_s: float | None
    kv_gib: float
    inside: bool
    ttft_s_range: tuple[float, float] | None = None
    requests_s_range: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class CellPrediction:
    """The predicted times of a cell; None where the grid has too few cells."""

    ttft_s: float | None
    requests_s: float | None


@dataclass(frozen=True, slots=True)
class PredictorErrors:
    """How well the grid predicts points of itself that were left out."""

    ttft: InterpolationError | None
    requests_s: InterpolationError | None


class _ArmKind:
    """What is fitted for one kind of arms: those that map chunks (`linked`), or all others.

    `alone` and `bursts` are how single `measured` cells lie around the fitted first tokens and
    requests a second, `tails` the 95th percentiles over medians of cells whose requests are alike.
    """

    def __init__(
        self, grid: MeasuredGrid, measured: MeasuredGrid, arms: Collection[str], *, linked: bool
    ) -> None:
        self._grid, self._arms, self._linked = grid, arms, linked
        self.graphs = grid.facts.captured(linked=linked)
        self.ttft = fit(list(self.first_tokens()))
        self.seconds = fit(list(self.loops()))
        alone, bursts, tails = [], [], []
        for point, cells in self._observed(measured):
            for cell in cells:
                fitted = self.predict(point, cell)
                if point.load == ALONE and fitted.ttft_s:
                    alone.append((_first(cell), cell.ttft_s / fitted.ttft_s))
                if fitted.requests_s:
                    bursts.append((cell.computed, cell.requests_s / fitted.requests_s))
            for cell in _quiet_cells(cells) if point.load == ALONE else ():
                if cell.middle and alike(cell.computed, cell.middle[0]):
                    tails.append((cell.middle[0], cell.ttft_p95_s / cell.ttft_s))
        self.alone, self.bursts = CellSpread.of(alone), CellSpread.of(bursts)
        self.tails = CellSpread.of(tails)

    def predict(self, point: GridPoint, cell: ArmCell) -> CellPrediction:
        """The fitted times of a cell, of what it computed."""
        _, alone, loop = self._counts(point, [cell])
        return CellPrediction(
            self.ttft.predict(alone.first_token(self.graphs)) if self.ttft else None,
            cell.requests / self.seconds.predict(loop.costs()) if self.seconds else None,
        )

    def covers(self, mean: RequestSize) -> bool:
        """Whether both times are fitted to such requests; TTFT does not depend on the reply."""
        if self.ttft is None or self.seconds is None:
            return False
        shape = _shape(mean)
        return self.ttft.covers(shape[:-1]) and self.seconds.covers(shape)

    def first_tokens(self) -> Iterator[Observation]:
        """TTFT of requests alone, a median at each point."""
        for point, arms in self._observed(self._grid):
            if point.load == ALONE:
                quiet = _quiet_cells(arms)
                _, size, _ = self._counts(point, quiet)
                value = median(arm.ttft_s for arm in quiet)
                counts = size.first_token(self.graphs)
                yield Observation(_traffic(point), counts, value, _shape(size)[:-1])

    def loops(self) -> Iterator[Observation]:
        """Seconds of the engine for all requests, a median at each point."""
        for point, arms in self._observed(self._grid):
            mean, _, loop = self._counts(point, arms)
            value = loop.requests / median(arm.requests_s for arm in arms)
            yield Observation(_traffic(point), loop.costs(), value, _shape(mean))

    def _counts(
        self, point: GridPoint, arms: Sequence[ArmCell]
    ) -> tuple[RequestSize, RequestSize, LoopCounts]:
        """The mean request of a cell's repeats, that of the median TTFT, and what serving takes."""
        mean = RequestSize(
            prompt=fmean(arm.prompt for arm in arms),
            computed=fmean(arm.computed for arm in arms),
            compiled=fmean(arm.compiled or 0.0 for arm in arms),
            # Chunks are text to arms that do not map them.
            chunks=point.chunks if self._linked else 0.0,
            chunk_tokens=point.chunk_tokens,
            output=fmean(arm.output for arm in arms),
        )
        facts, running = self._grid.facts, 1 if point.load == ALONE else self._grid.facts.running
        requests = repeat(mean, arms[0].requests)
        loop = serve_loop(requests, running, facts.step_tokens, self.graphs)
        known = [arm.middle for arm in arms if arm.middle is not None]
        if len(known) < len(arms):
            return mean, mean, loop
        computed, compiled = (fmean(column) for column in zip(*known, strict=True))
        return mean, mean._replace(computed=computed, compiled=compiled), loop

    def _observed(self, measured: MeasuredGrid) -> Iterator[tuple[GridPoint, list[ArmCell]]]:
        """Each point of a closed loop, and the repeats of each arm of the kind in it."""
        arms = [arm for arm in measured.arms if arm in self._arms]
        for point, cells in measured.points().items():
            for arm in arms if point.load in (ALONE, BURST) else ():
                if repeats := [cell.arms[arm] for cell in cells if arm in cell.arms]:
                    yield point, repeats


class GridPredictor:
    """Predicts from the cells of one grid; arms of one kind share their costs.

    The kinds are arms that map chunks, and arms that compute whole prompts from some token on. TTFT
    is fitted to requests alone. What a request takes of the engine is fitted to all closed loops:
    each is served again by a simulated scheduler, which counts its steps.

    Another machine takes other times. With a `calibration`, cells of the same grid that were
    measured there, predictions are for that machine: each time of the grid is multiplied by the
    median ratio of those of its cells that compute about as much.

    Raises ConfigError for a calibration of another model or engine, or with too few cells.
    """

    def __init__(
        self,
        grid: MeasuredGrid,
        block_bytes: int | None = None,
        calibration: MeasuredGrid | None = None,
    ) -> None:
        self.grid, self.calibration = grid, calibration
        self._block_bytes = block_bytes or grid.facts.block_bytes
        parse, measured = Registry().parse, calibration or grid
        self._kinds = {}
        for linked in (False, True):
            known = {*grid.arms, *measured.arms}
            arms = {arm for arm in known if links_chunks(parse(arm)) is linked}
            self._kinds[linked] = _ArmKind(grid, measured, arms, linked=linked)
        if calibration is not None:
            self._check(calibration)

    def _check(self, calibration: MeasuredGrid) -> None:
        for name in ("model", "dtype", "running", "step_tokens"):
            there, here = getattr(self.grid.facts, name), getattr(calibration.facts, name)
            if there != here:
                raise ConfigError(
                    f"`calibration`: its {name} is {here}, the grid's is {there}",
                    hint="measure the same grid, or name another `grid`",
                )
        if any(kind.alone is None or kind.bursts is None for kind in self._kinds.values()):
            raise ConfigError(
                "`calibration`: too few cells, it needs 20 of each load for arms that map chunks",
                hint="measure more of the grid there",
            )

    @property
    def warning(self) -> str | None:
        """What to know of a calibration whose engines had other graphs than the grid's."""
        if self.calibration is None:
            return None
        return self.calibration.facts.graph_warning(self.grid.facts, "--calibration")

    def predict(self, profile: TraceProfile, arm: ArmProfile) -> ArmPrediction:
        """The figures of an arm."""
        links = links_chunks(arm.algorithm)
        linked = links and profile.traffic.chunks > 0
        kind, graphs = self._kinds[linked], self._kinds[links].graphs
        sizes = [size if linked else size._replace(chunks=0.0) for size in arm.sizes]
        kv_gib = arm.peak_blocks * self._block_bytes / 2**30
        if not sizes:
            return ArmPrediction(None, None, None, kv_gib, False)
        computed, mean = [size.computed for size in sizes], mean_size(sizes)
        slow, longer = self._slowness(kind, median(computed), mean.computed)
        first = first_range = rate = rate_range = loaded = None
        if kind.ttft:
            times = [kind.ttft.predict(size.first_token(graphs)) for size in sizes]
            first = scattered_median(times, deviations(kind.tails, computed)) * slow
            first_range = kind.alone.around_median(times, computed) if kind.alone else None
        if kind.seconds:
            # Seconds of the engine for each request; those of steps are the same for each.
            none = (0.0,) * len(arm.loop.step_costs())
            own = [kind.seconds.predict((*size.prefill(), *none)) for size in sizes]
            steps = (*(0.0 for _ in arm.loop.prefill), *arm.loop.step_costs())
            share = kind.seconds.predict(steps) / len(own)
            fitted = [seconds + share for seconds in own]
            each = [seconds * longer for seconds in fitted]
            rate = 1 / fmean(each)
            if kind.bursts:
                rate_range = kind.bursts.around(1 / fmean(fitted), mean.computed)
            if first is not None and profile.traffic.rate is not None:
                loaded = first + _wait(each, profile.traffic.rate)
        return ArmPrediction(
            first, rate, loaded, kv_gib, kind.covers(mean), first_range, rate_range
        )

    def predict_cell(self, arm: str, point: GridPoint, cell: ArmCell) -> CellPrediction:
        """The times of a cell that an arm has served, from what it computed there."""
        kind = self._kinds[links_chunks(Registry().parse(arm))]
        found = kind.predict(point, cell)
        slow, longer = self._slowness(kind, _first(cell), cell.computed)
        return CellPrediction(
            found.ttft_s * slow if found.ttft_s else None,
            found.requests_s / longer if found.requests_s else None,
        )

    def errors(self) -> PredictorErrors:
        """Leave-one-out errors of both times, over the arms of both kinds."""
        kinds = self._kinds.values()
        return PredictorErrors(
            leave_one_out([list(kind.first_tokens()) for kind in kinds]),
            leave_one_out([list(kind.loops()) for kind in kinds]),
        )

    def _slowness(self, kind: _ArmKind, first: float, computed: float) -> tuple[float, float]:
        """The ratios of times on this machine to the grid's: of first tokens, of the engine's work.

        The request whose first token is meant computes `first` tokens, the mean one `computed`.
        """
        if self.calibration is None or kind.alone is None or kind.bursts is None:
            return 1.0, 1.0
        return kind.alone.middle(first), 1 / kind.bursts.middle(computed)


def _quiet_cells(arms: Sequence[ArmCell]) -> Sequence[ArmCell]:
    """The repeats whose requests began on quiet cores; all of them if none did.

    Small steps wait for the host, which takes 1.5 times as long for them when it is busy.
    """
    return [arm for arm in arms if arm.quiet is None or arm.quiet >= QUIET] or arms


def _first(cell: ArmCell) -> float:
    """Tokens computed for the request of the median TTFT, or else in the mean."""
    return cell.middle[0] if cell.middle is not None else cell.computed


def _traffic(point: GridPoint) -> GridPoint:
    """What is left out together: a point with a cold and a warm cache, alone and in a burst."""
    return replace(point, cache="cold", load=BURST)


def _shape(size: RequestSize) -> tuple[float, ...]:
    """What must be within the range of the grid; the reply comes last."""
    return size.prompt, size.computed, size.chunks, size.output


def _wait(each: Sequence[float], rate: float) -> float:
    """Mean wait in a queue with random arrivals (M/G/1, Pollaczek-Khinchine).

    `each` are the service times.
    """
    used = rate * fmean(each)
    return inf if used >= 1 else rate * fmean(s**2 for s in each) / (2 * (1 - used))
