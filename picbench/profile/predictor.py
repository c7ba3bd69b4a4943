"""Times and memory of arms, predicted from a measured grid."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from math import inf
from statistics import fmean, median

from picbench.engines.algorithms import Registry
from picbench.errors import ConfigError
from picbench.profile.costs import (
    CellSpread,
    CostModel,
    InterpolationError,
    Observation,
    RequestSize,
    alike,
    captured,
    cell_size,
    deviations,
    fit,
    graph_warning,
    leave_one_out,
    links_chunks,
    mean_size,
    middle,
    of_kind,
    quiet_cells,
    scattered_median,
)
from picbench.profile.grid import ALONE, BURST, ArmCell, GridPoint, MeasuredGrid
from picbench.profile.profile import ArmProfile, LoopCounts, TraceProfile, serve_loop

_Spreads = tuple[CellSpread | None, CellSpread | None]


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
    """What the grid's costs say of a cell; None for too few cells."""

    ttft_s: float | None
    requests_s: float | None


@dataclass(frozen=True, slots=True)
class PredictorErrors:
    """How well the grid predicts points of itself that were left out."""

    ttft: InterpolationError | None
    requests_s: InterpolationError | None


class GridPredictor:
    """Predicts from the cells of one grid; arms of one kind share their costs.

    The kinds are arms that map chunks, and arms that compute whole prompts from some token on. TTFT
    is fitted to requests alone. What a request takes of the engine is fitted to all closed loops:
    each is served again by a simulated scheduler, which counts its steps.

    Another machine takes other times. With a `calibration`, cells of the same grid that were
    measured there, predictions are of that machine: how many times as long as the grid says it
    takes is the median over those of its cells that compute about as much.
    """

    def __init__(
        self,
        grid: MeasuredGrid,
        block_bytes: int | None = None,
        calibration: MeasuredGrid | None = None,
    ) -> None:
        self.grid, self.calibration = grid, calibration
        self._block_bytes = block_bytes or grid.facts.block_bytes
        self._registry = Registry()
        self._graphs = {kind: captured(grid.facts, linked=kind) for kind in (False, True)}
        self._ttft = {linked: fit(list(self._alone(linked))) for linked in (False, True)}
        self._seconds = {linked: fit(list(self._loops(linked))) for linked in (False, True)}
        measured = calibration or grid
        self._spread = {linked: self._spreads(linked, measured) for linked in (False, True)}
        self._tails = {
            linked: CellSpread.of(self._like_requests(linked, measured)) for linked in (False, True)
        }
        if calibration is not None:
            _require_like(grid, calibration, self._spread.values())

    @property
    def warning(self) -> str | None:
        """What to know of a calibration whose engines had other graphs than the grid's."""
        if self.calibration is None:
            return None
        return graph_warning(self.calibration.facts, self.grid.facts, "--calibration")

    def predict(self, profile: TraceProfile, arm: ArmProfile) -> ArmPrediction:
        """The figures of an arm."""
        kind = links_chunks(arm.algorithm) and profile.traffic.chunks > 0
        ttft, seconds = self._ttft[kind], self._seconds[kind]
        sizes = [of_kind(size, linked=kind) for size in arm.sizes]
        graphs = self._graphs[links_chunks(arm.algorithm)]
        times = [ttft.predict(size.first_token(graphs)) for size in sizes] if ttft else []
        computed = [size.computed for size in sizes]
        alone = scattered_median(times, deviations(self._tails[kind], computed)) if times else None
        each = _each(sizes, arm.loop, seconds) if seconds and sizes else None
        rate = 1 / fmean(each) if each else None
        spread, bursts = self._spread[kind]
        slow = self._slowness(kind, median(computed), fmean(computed)) if sizes else (1.0, 1.0)
        first = alone * slow[0] if alone else None
        each = [one * slow[1] for one in each] if each else None
        return ArmPrediction(
            ttft_s=first,
            ttft_s_range=spread.around_median(times, computed) if spread and times else None,
            requests_s=1 / fmean(each) if each else None,
            requests_s_range=bursts.around(rate, fmean(computed)) if bursts and rate else None,
            loaded_ttft_s=_loaded(first, each, profile.traffic.rate),
            kv_gib=arm.peak_blocks * self._block_bytes / 2**30,
            inside=bool(sizes) and _covers(ttft, seconds, _shape(mean_size(sizes))),
        )

    def predict_cell(self, arm: str, point: GridPoint, cell: ArmCell) -> CellPrediction:
        """The times of a cell that an arm has served, from what it computed there."""
        linked = links_chunks(self._registry.parse(arm))
        found = self._cell(linked, point, cell)
        first = middle([cell]).get("computed", cell.computed)
        slow, longer = self._slowness(linked, first, cell.computed)
        return CellPrediction(
            found.ttft_s * slow if found.ttft_s else None,
            found.requests_s / longer if found.requests_s else None,
        )

    def _slowness(self, linked: bool, first: float, computed: float) -> tuple[float, float]:
        """How many times as long as the grid says first tokens and the engine's work take.

        The request whose first token is meant computes `first` tokens, a mean one `computed`.
        """
        spread, bursts = self._spread[linked]
        if self.calibration is None or spread is None or bursts is None:
            return 1.0, 1.0
        return spread.middle(first), 1 / bursts.middle(computed)

    def _cell(self, linked: bool, point: GridPoint, cell: ArmCell) -> CellPrediction:
        ttft, seconds = self._ttft[linked], self._seconds[linked]
        alone, loop = self._cell_counts(point, [cell], linked)
        return CellPrediction(
            ttft.predict(alone.first_token(self._graphs[linked])) if ttft else None,
            cell.requests / seconds.predict(loop.costs()) if seconds else None,
        )

    def errors(self) -> PredictorErrors:
        """Leave-one-out errors of both times, over the arms of both kinds."""
        return PredictorErrors(
            leave_one_out([list(self._alone(linked)) for linked in (False, True)]),
            leave_one_out([list(self._loops(linked)) for linked in (False, True)]),
        )

    def _spreads(self, linked: bool, measured: MeasuredGrid) -> _Spreads:
        """How single measured cells lie around what is fitted: first tokens, requests a second."""
        alone, loops = [], []
        for point, arms in self._observed(linked, measured):
            for arm, cell in ((arm, self._cell(linked, point, arm)) for arm in arms):
                if point.load == ALONE and cell.ttft_s:
                    computed = middle([arm]).get("computed", arm.computed)
                    alone.append((computed, arm.ttft_s / cell.ttft_s))
                if cell.requests_s:
                    loops.append((arm.computed, arm.requests_s / cell.requests_s))
        return CellSpread.of(alone), CellSpread.of(loops)

    def _like_requests(self, linked: bool, measured: MeasuredGrid) -> Iterator[tuple[float, float]]:
        """Computed tokens and 95th percentile over median of cells of requests alone, all alike."""
        for point, arms in self._observed(linked, measured):
            if point.load != ALONE:
                continue
            for arm in quiet_cells(arms):
                if arm.middle is not None and alike(arm.computed, arm.middle[0]):
                    yield arm.middle[0], arm.ttft_p95_s / arm.ttft_s

    def _alone(self, linked: bool) -> Iterator[Observation]:
        for point, arms in self._observed(linked, self.grid):
            if point.load == ALONE:
                quiet = quiet_cells(arms)
                size, _ = self._cell_counts(point, quiet, linked)
                value = median(arm.ttft_s for arm in quiet)
                counts, shape = size.first_token(self._graphs[linked]), _shape(size)
                yield Observation(_traffic(point), counts, value, shape[:-1])

    def _loops(self, linked: bool) -> Iterator[Observation]:
        for point, arms in self._observed(linked, self.grid):
            _, loop = self._cell_counts(point, arms, linked)
            value = loop.requests / median(arm.requests_s for arm in arms)
            shape = _shape(cell_size(point, arms, linked=linked))
            yield Observation(_traffic(point), loop.costs(), value, shape)

    def _cell_counts(
        self, point: GridPoint, arms: Sequence[ArmCell], linked: bool
    ) -> tuple[RequestSize, LoopCounts]:
        """The request of the median TTFT, and what serving the cell counts."""
        size = cell_size(point, arms, linked=linked)
        running = 1 if point.load == ALONE else self.grid.facts.running
        requests = repeat(size, arms[0].requests)
        budget = self.grid.facts.step_tokens
        loop = serve_loop(requests, running, budget, self._graphs[linked])
        return replace(size, **middle(arms)), loop

    def _observed(
        self, linked: bool, measured: MeasuredGrid
    ) -> Iterator[tuple[GridPoint, list[ArmCell]]]:
        """Each point of a closed loop, and the repeats of each arm of a kind in it."""
        for point, cells in measured.points().items():
            if point.load not in (ALONE, BURST):
                continue
            for arm in measured.arms:
                repeats = [cell.arms[arm] for cell in cells if arm in cell.arms]
                if repeats and links_chunks(self._registry.parse(arm)) is linked:
                    yield point, repeats


def _require_like(
    grid: MeasuredGrid, calibration: MeasuredGrid, spreads: Iterable[_Spreads]
) -> None:
    for name in ("model", "dtype", "running", "step_tokens"):
        there, here = getattr(grid.facts, name), getattr(calibration.facts, name)
        if there != here:
            raise ConfigError(
                f"`calibration`: its {name} is {here}, the grid's is {there}",
                hint="measure the same grid, or name another `grid`",
            )
    if any(spread is None for pair in spreads for spread in pair):
        raise ConfigError(
            "`calibration`: too few cells, it needs 20 of each load for arms that map chunks",
            hint="measure more of the grid there",
        )


def _each(sizes: Sequence[RequestSize], loop: LoopCounts, model: CostModel) -> list[float]:
    """Seconds of the engine for each request; those of steps are the same for each."""
    own = [model.predict((*size.prefill(), *(0.0 for _ in loop.step_costs()))) for size in sizes]
    steps = model.predict((*(0.0 for _ in loop.prefill), *loop.step_costs()))
    return [seconds + steps / len(own) for seconds in own]


def _traffic(point: GridPoint) -> GridPoint:
    """What is left out together: a point with a cold and a warm cache, alone and in a burst."""
    return replace(point, cache="cold", load=BURST)


def _shape(size: RequestSize) -> tuple[float, ...]:
    """What must be within the range of the grid; the reply comes last."""
    return size.prompt, size.computed, size.chunks, size.output


def _covers(ttft: CostModel | None, seconds: CostModel | None, shape: Sequence[float]) -> bool:
    """Whether both times are of such requests; TTFT does not depend on the reply."""
    if ttft is None or seconds is None:
        return False
    return ttft.covers(shape[:-1]) and seconds.covers(shape)


def _loaded(alone: float | None, each: Sequence[float] | None, rate: float | None) -> float | None:
    """TTFT with the mean wait of a queue with random arrivals (M/G/1, Pollaczek-Khinchine).

    `each` are the service times.
    """
    if alone is None or each is None or rate is None:
        return None
    used = rate * fmean(each)
    if used >= 1:
        return inf
    return alone + rate * fmean(seconds**2 for seconds in each) / (2 * (1 - used))
