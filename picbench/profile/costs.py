"""Interpolation between measured cells: costs, fitted to all of them.

A time is a sum of costs that cannot be negative, each multiplied by how often it is paid: requests,
computed tokens, what these attend to, chunks, steps, generated tokens. The sum is fitted to
relative errors (Lawson and Hanson's non-negative least squares), so that short times count as much
as long ones, and errors beyond the usual ones count less the larger they are (Huber's weights),
because another program on the machine makes a cell several times as long. How well that
interpolates is measured by leaving out one point of the grid after another (`leave_one_out`).
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import numpy as np
from scipy.optimize import brentq, nnls  # type: ignore[import-untyped]
from scipy.special import ndtr  # type: ignore[import-untyped]

from picbench.compare.intervals import order_interval
from picbench.engines.algorithms import Algorithm, Registry, Reuse
from picbench.profile.grid import QUIET, ArmCell, GridFacts, GridPoint

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


#: The share of cells that a range covers.
COVERED = 0.9

#: Of cells that are about as large: their share of all, and how many a range needs at least. A
#: median does with fewer, so that it is of one size in a calibration of minutes as well.
_NEAREST, _FEWEST, _FEWEST_OF_MEDIAN = 1 / 3, 20, 7

_CellSpreadArray = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class CellSpread:
    """Measured over fitted values, `ratios` [cells], by computed tokens of a request.

    `sizes` [cells] are logarithms of these.
    """

    sizes: _CellSpreadArray
    ratios: _CellSpreadArray

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

    def _nearest(self, computed: float, fewest: int) -> _CellSpreadArray:
        count = max(fewest, round(_NEAREST * len(self.sizes)))
        apart = np.abs(self.sizes - np.log(max(computed, 1.0)))
        nearest: _CellSpreadArray = self.ratios[apart <= np.partition(apart, count - 1)[count - 1]]
        return nearest


#: The 95th percentile of a normal distribution, in standard deviations.
_P95 = 1.6449

#: How far apart the mean and the middle request of a cell may be if all requests are alike, as a
#: share, and in tokens.
_ALIKE, _TOKENS = 0.02, 2.0

#: Below all scatter that was measured.
_REQUEST_SCATTER_LEAST = 1e-4

_RequestScatterArray = np.ndarray[Any, np.dtype[np.float64]]


def alike(computed: float, middle: float) -> bool:
    """Whether all requests of a cell compute about as much, by their mean and the middle one."""
    return abs(middle - computed) <= _ALIKE * computed + _TOKENS


def deviations(tails: CellSpread | None, computed: Sequence[float]) -> _RequestScatterArray:
    """Standard deviations of the logarithms of times, for requests of so many tokens [requests].

    `tails` are 95th percentiles over medians, of cells of like requests; without, there are none.
    """
    if tails is None:
        return np.zeros(len(computed))
    different, places = np.unique(np.asarray(computed, np.float64), return_inverse=True)
    found = np.array([max(tails.middle(size), 1.0) for size in different.tolist()])
    each: _RequestScatterArray = (np.log(found) / _P95)[places]
    return each


def scattered_median(usual: Sequence[float], scatter: _RequestScatterArray) -> float:
    """The median of requests whose times are lognormal around the `usual` ones [requests].

    `scatter` [requests] are their `deviations`.
    """
    times = np.asarray(usual, np.float64)
    if not scatter.any() or times.min() <= 0:
        return float(np.median(times))
    logs, scatter = np.log(times), np.maximum(scatter, _REQUEST_SCATTER_LEAST)

    def above_half(log: float) -> float:
        return float(ndtr((log - logs) / scatter).mean()) - 0.5

    ends = float(logs.min()) - 1.0, float(logs.max()) + 1.0
    return float(np.exp(brentq(above_half, *ends, xtol=1e-6)))


#: Thousands of tokens of a step from which on each costs more: a GPU computes a few hundred while
#: its host starts them. Fitted costs say from which of them on, for arms of either kind.
KNOTS = (0.5, 1.0)

#: Thousands of computed tokens that may cost more each than the following ones, without graphs.
_FIRST = 0.128


def _numbers() -> "array[float]":
    return array("d")


def beyond_knots(thousands: float) -> tuple[float, ...]:
    """How many thousands of a step's tokens are beyond each knot."""
    return tuple(max(0.0, thousands - knot) for knot in KNOTS)


@dataclass(frozen=True, slots=True)
class RequestSize:
    """A request: tokens of its prompt, those computed for it, its chunks, tokens of its reply.

    `compiled` of the computed tokens are those of chunks, which see nothing but their chunk;
    `chunk_tokens` are those of a chunk, in the mean.
    """

    prompt: float
    computed: float
    compiled: float
    chunks: float
    chunk_tokens: float
    output: float

    @property
    def pairs(self) -> float:
        """Computed tokens times the tokens that they may attend to, in millions."""
        own = (self.computed - self.compiled) * self.prompt
        return (own + self.compiled * self.chunk_tokens) / 1e6

    @property
    def jobs(self) -> float:
        """Chunks that are compiled."""
        return self.compiled / self.chunk_tokens if self.chunk_tokens else 0.0

    def prefill(self) -> tuple[float, ...]:
        """What costs of a request are multiplied by, but for those of its steps and its reply."""
        computed, prompt = self.computed / 1e3, self.prompt / 1e3
        return 1.0, computed, self.pairs, prompt, self.chunks, self.jobs

    def first_token(self, graph_tokens: int) -> tuple[float, ...]:
        """What the time to the first token of a request alone is multiplied by.

        On a GPU a step takes no less than the host needs to start it: more where chunks are
        compiled, and where it has more than the `graph_tokens` that CUDA graphs serve, so that its
        kernels are started one by one.
        """
        computed = self.computed / 1e3
        started = float(self.computed > graph_tokens) if graph_tokens else min(_FIRST, computed)
        return *self.prefill(), min(1.0, self.jobs), started, *beyond_knots(computed)


@dataclass(frozen=True, slots=True)
class RequestSizes:
    """The numbers of `RequestSize` of many requests, a column each."""

    prompt: "array[float]" = field(default_factory=_numbers)
    computed: "array[float]" = field(default_factory=_numbers)
    compiled: "array[float]" = field(default_factory=_numbers)
    chunks: "array[float]" = field(default_factory=_numbers)
    chunk_tokens: "array[float]" = field(default_factory=_numbers)
    output: "array[float]" = field(default_factory=_numbers)

    def add(self, size: RequestSize) -> None:
        """A request."""
        self.prompt.append(size.prompt)
        self.computed.append(size.computed)
        self.compiled.append(size.compiled)
        self.chunks.append(size.chunks)
        self.chunk_tokens.append(size.chunk_tokens)
        self.output.append(size.output)

    def __len__(self) -> int:
        """How many requests."""
        return len(self.prompt)

    def __iter__(self) -> Iterator[RequestSize]:
        """The requests, in order."""
        columns = (
            self.prompt,
            self.computed,
            self.compiled,
            self.chunks,
            self.chunk_tokens,
            self.output,
        )
        return (RequestSize(*numbers) for numbers in zip(*columns, strict=True))

    @classmethod
    def of(cls, sizes: Iterator[RequestSize] | list[RequestSize]) -> "RequestSizes":
        """All of them."""
        found = cls()
        for size in sizes:
            found.add(size)
        return found


def cell_size(point: GridPoint, arms: Sequence[ArmCell], *, linked: bool) -> RequestSize:
    """The mean request of a cell's repeats."""
    size = RequestSize(
        prompt=fmean(arm.prompt for arm in arms),
        computed=fmean(arm.computed for arm in arms),
        compiled=fmean(arm.compiled or 0.0 for arm in arms),
        chunks=point.chunks,
        chunk_tokens=point.chunk_tokens,
        output=fmean(arm.output for arm in arms),
    )
    return of_kind(size, linked=linked)


def quiet_cells(arms: Sequence[ArmCell]) -> Sequence[ArmCell]:
    """The repeats whose requests began on quiet cores; all of them if none did.

    Small steps wait for the host: what else it does makes them 1.5 times as long.
    """
    return [arm for arm in arms if arm.quiet is None or arm.quiet >= QUIET] or arms


def middle(arms: Sequence[ArmCell]) -> dict[str, float]:
    """What the request of the median TTFT computed, where that is known."""
    known = [arm.middle for arm in arms if arm.middle is not None]
    if len(known) < len(arms):
        return {}
    computed, compiled = (fmean(column) for column in zip(*known, strict=True))
    return {"computed": computed, "compiled": compiled}


def of_kind(size: RequestSize, *, linked: bool) -> RequestSize:
    """Chunks are text to arms that do not map them."""
    return size if linked else replace(size, chunks=0.0)


def mean_size(sizes: Sequence[RequestSize]) -> RequestSize:
    """The mean of each number."""
    return RequestSize(
        prompt=fmean(size.prompt for size in sizes),
        computed=fmean(size.computed for size in sizes),
        compiled=fmean(size.compiled for size in sizes),
        chunks=fmean(size.chunks for size in sizes),
        chunk_tokens=fmean(size.chunk_tokens for size in sizes),
        output=fmean(size.output for size in sizes),
    )


def links_chunks(algorithm: Algorithm) -> bool:
    """Whether an algorithm maps chunks."""
    return algorithm.reuse is Reuse.CHUNKS


#: Of engines whose files do not say: vLLM's choice for engines of 64 requests.
_UNRECORDED = 128


def captured(facts: GridFacts, *, linked: bool) -> int:
    """Tokens of the largest step that graphs of arms of a kind served; 0 without graphs."""
    sizes = facts.graph_tokens
    if sizes is None:
        return _UNRECORDED if _on_gpu(facts) else 0
    registry = Registry()
    kinds = {arm: links_chunks(registry.parse(arm)) for arm in sizes}
    return max((size for arm, size in sizes.items() if kinds[arm] is linked), default=0)


def graph_sizes(facts: GridFacts) -> str:
    """In words: by arm, where they are not all the same."""
    if not _on_gpu(facts) or (facts.graph_tokens and not any(facts.graph_tokens.values())):
        return "no CUDA graphs"
    if facts.graph_tokens is None:
        return f"CUDA graphs whose size its file does not say ({_UNRECORDED} tokens, or 512 later)"
    return f"CUDA graphs of up to {' and '.join(_sizes(facts.graph_tokens))} tokens"


def same_graphs(one: GridFacts, other: GridFacts) -> bool:
    """Whether the arms that two grids have in common had graphs of the same sizes."""
    here, there = one.graph_tokens, other.graph_tokens
    if here is None or there is None:
        return here is there or not (_on_gpu(one) or _on_gpu(other))
    return all(here[arm] == there[arm] for arm in here if arm in there)


def graph_warning(measured: GridFacts, grid: GridFacts, name: str) -> str | None:
    """What to know of a grid's predictions for what was `measured`; None for the same graphs.

    `name` says what that is.
    """
    if same_graphs(measured, grid):
        return None
    return (
        f"{name}: {graph_sizes(measured)}, --grid: {graph_sizes(grid)}. Steps between these sizes "
        "take other times; measure the grid again (picbench measure break-even)."
    )


def _on_gpu(facts: GridFacts) -> bool:
    return facts.versions.get("driver", "none") != "none"


def _sizes(tokens: Mapping[str, int]) -> Iterator[str]:
    for size in sorted(set(tokens.values())):
        arms = [arm for arm, own in tokens.items() if own == size]
        yield f"{size:,}" + ("" if len(arms) == len(tokens) else f" ({', '.join(arms)})")
