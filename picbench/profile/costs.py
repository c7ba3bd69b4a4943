"""What serving takes, counted in factors of costs, and costs that are fitted to measured times.

Steps are those of vLLM's scheduler, simulated for so many requests at a time. A step has a budget
of tokens. Running requests go first: one token for each that generates, the rest of their prompts
for the others; then waiting requests are admitted while there is room. Steps do not depend on how
long they take, because a request is sent as soon as another one ends.

A time is a sum of costs that cannot be negative, each multiplied by a factor: requests, computed
tokens, the tokens that these attend to, chunks, steps, generated tokens. The sum is fitted to
relative errors (Lawson and Hanson's non-negative least squares), so that short times count as much
as long ones, and errors beyond the usual ones count less the larger they are (Huber's weights),
because another program on the machine makes a cell several times as long.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import brentq, nnls  # type: ignore[import-untyped]
from scipy.special import ndtr  # type: ignore[import-untyped]

from picbench.engines.config import BLOCK_SIZE
from picbench.engines.costs import KNOTS, CostModel, RequestSize, beyond_knots
from picbench.profile.reuse import RequestReuse
from picbench.statistics.intervals import order_interval

#: How many different observations more than costs are needed at least.
_SPARE = 2

#: Huber's constant: errors beyond so many of their usual size count less. Relative errors below the
#: least are never unusual, and weights are made anew so often.
_USUAL, _LEAST, _ROUNDS = 1.345, 0.01, 20

#: The share of cells that a range covers, and its ends.
_COVERED = 0.9
_EDGES = ((1 - _COVERED) / 2, (1 + _COVERED) / 2)

#: Cells that are about as large: their share of all, and how many a range needs at least. A median
#: does with fewer, so that it is of one size in a calibration of minutes as well.
_NEAREST, _FEWEST, _FEWEST_OF_MEDIAN = 1 / 3, 20, 7

#: The 95th percentile of a normal distribution, in standard deviations.
_P95 = 1.6449

#: Below all scatter that was measured.
_LEAST_SCATTER = 1e-4

_Array = np.ndarray[Any, np.dtype[np.float64]]


class LoopCounts:
    """What serving all requests takes, in the factors of costs.

    `prefill` sums `RequestSize.prefill`. `prefill_steps` compute tokens of prompts, `started` of
    them have more tokens than CUDA graphs serve, and `beyond` are thousands of tokens of prompts
    that steps have beyond each knot. `replies` are the generated tokens without the first of each
    request, `read` thousands of tokens whose KV they read.
    """

    def __init__(self) -> None:
        self.prefill: tuple[float, ...] = ()
        self.beyond = (0.0,) * len(KNOTS)
        self.prefill_steps = self.started = self.steps = self.replies = self.read = 0.0
        self.requests = 0

    def step_costs(self) -> tuple[float, ...]:
        """The factors of the costs that steps have, whichever requests they serve."""
        prefills = self.prefill_steps, self.started, *self.beyond
        return *prefills, self.steps, self.replies, self.read


@dataclass(slots=True)
class _Live:
    """A running request: tokens of its prompt and of its reply that are left, and its context.

    `compiling` are blocks that only the compiles of its chunks hold, until their step has ended.
    """

    prompt: float
    reply: float
    context: float
    reuse: RequestReuse | None
    compiling: int


class ClosedLoop:
    """Serves requests in their order, `running` at a time, in steps of at most `budget` tokens.

    CUDA graphs serve steps of up to `graph_tokens`, 0 without graphs. Requests are pushed one by
    one; `counts` are complete after `close`, and so are `peak_blocks`: the most that running
    requests held, shared ones once.
    """

    def __init__(self, running: int, budget: int, graph_tokens: int = 0) -> None:
        self.counts, self.peak_blocks = LoopCounts(), 0
        self._running, self._budget, self._graphs = running, budget, graph_tokens
        self._prompts, self._held = 0.0, 0
        self._users: Counter[int | bytes] = Counter()
        self._live: list[_Live] = []
        self._waiting: deque[_Live] = deque()

    def push(self, size: RequestSize, reuse: RequestReuse | None = None) -> None:
        """The next request, and what it holds, if that is to be counted."""
        counts, own = self.counts, size.prefill()
        counts.prefill = _sum(counts.prefill, own) if counts.prefill else own
        counts.requests += 1
        compiling = reuse.compile_blocks if reuse else 0
        computed, output = max(1.0, size.computed), max(1.0, size.output)
        self._waiting.append(_Live(computed, output, size.prompt + 1, reuse, compiling))
        while len(self._waiting) > self._running:  # A step admits no more.
            self._step()

    def close(self) -> LoopCounts:
        """Serve what is left."""
        while self._live or self._waiting:
            self._step()
        return self.counts

    def _step(self) -> None:
        """One step, or all of them up to the next that can be another one."""
        full = not self._waiting or len(self._live) >= self._running
        if self._live and full and all(request.prompt <= 0 for request in self._live):
            self._generate(min(request.reply for request in self._live))
        else:
            self._mixed()
        # Blocks in the middle of a step; those of a reply come as it grows.
        growing = sum(r.compiling - int(r.reply // BLOCK_SIZE) for r in self._live)
        self.peak_blocks = max(self.peak_blocks, self._held + growing)
        for request in self._live:
            request.compiling = 0
            if request.reply <= 0:
                self._hold(request.reuse, -1)
        self._live = [request for request in self._live if request.reply > 0]

    def _generate(self, steps: float) -> None:
        """Steps in which all that run generate, and none can be admitted."""
        count, counts = len(self._live), self.counts
        counts.steps += steps
        counts.replies += steps * count
        contexts = sum(request.context for request in self._live)
        counts.read += (steps * contexts + count * steps * (steps - 1) / 2) / 1e3
        for request in self._live:
            request.reply -= steps
            request.context += steps

    def _mixed(self) -> None:
        """One step, in which requests may be admitted."""
        counts, room = self.counts, float(self._budget)
        counts.steps += 1
        self._prompts = 0.0
        for request in self._live:
            room -= self._serve(request, room)
        while room > 0 and self._waiting and len(self._live) < self._running:
            request = self._waiting.popleft()
            self._hold(request.reuse, 1)
            room -= self._serve(request, room)
            self._live.append(request)
        if self._prompts > 0:
            counts.prefill_steps += 1
            counts.started += 0 < self._graphs < self._budget - room
            counts.beyond = _sum(counts.beyond, beyond_knots(self._prompts / 1e3))

    def _serve(self, request: _Live, room: float) -> float:
        """Give a request its tokens of a step; how many it took."""
        if request.prompt > 0:
            took = max(0.0, min(request.prompt, room))
            request.prompt -= took
            self._prompts += took
            request.reply -= request.prompt <= 0
            return took
        self.counts.replies += 1
        self.counts.read += request.context / 1e3
        request.reply -= 1
        request.context += 1
        return 1.0

    def _hold(self, reuse: RequestReuse | None, sign: int) -> None:
        """Count the blocks of a request that begins (1); leave out those of an ended one (-1)."""
        if reuse is None:
            return
        self._held += sign * reuse.own_blocks
        for key, blocks in reuse.shared:
            before = self._users[key]
            self._users[key] += sign
            if not before or not self._users[key]:
                self._held += sign * blocks
            if not self._users[key]:
                del self._users[key]


def _sum(one: tuple[float, ...], other: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(a + b for a, b in zip(one, other, strict=True))


def serve_loop(
    sizes: Iterable[RequestSize], running: int, budget: int, graph_tokens: int = 0
) -> LoopCounts:
    """What serving these requests counts; see `ClosedLoop`."""
    loop = ClosedLoop(running, budget, graph_tokens)
    for size in sizes:
        loop.push(size)
    return loop.close()


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


class CellSpread(NamedTuple):
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
        low, high = order_interval(len(times), 0.5, _COVERED) or (1, len(times))
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


def scattered_median(
    usual: Sequence[float], computed: Sequence[float], tails: CellSpread | None
) -> float:
    """The median of requests whose times are lognormal around the `usual` ones [requests].

    `tails` are 95th percentiles over medians of cells whose requests are alike, and say how far the
    times of requests of so many `computed` tokens [requests] scatter; without them they do not.
    """
    times = np.asarray(usual, np.float64)
    different, places = np.unique(np.asarray(computed, np.float64), return_inverse=True)
    ratios = [max(tails.middle(size), 1.0) if tails else 1.0 for size in different.tolist()]
    scatter = (np.log(np.array(ratios)) / _P95)[places]
    if not scatter.any() or times.min() <= 0:
        return float(np.median(times))
    logs, scatter = np.log(times), np.maximum(scatter, _LEAST_SCATTER)

    def above_half(log: float) -> float:
        return float(ndtr((log - logs) / scatter).mean()) - 0.5

    ends = float(logs.min()) - 1.0, float(logs.max()) + 1.0
    return float(np.exp(brentq(above_half, *ends, xtol=1e-6)))
