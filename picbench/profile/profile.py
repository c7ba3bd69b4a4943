"""A trace under every arm in one pass: what is reused, and the steps that serving it takes.

The steps are those of vLLM's scheduler, simulated for so many requests at a time. A step has a
budget of tokens. Running requests go first: one token for each that generates, the rest of their
prompts for the others; then waiting requests are admitted while there is room. Steps do not depend
on how long they take, because a request is sent as soon as another one ends.
"""

from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from operator import add
from statistics import fmean
from typing import NamedTuple

from picbench.engines.algorithms import Algorithm
from picbench.engines.config import BLOCK_SIZE
from picbench.errors import DataError
from picbench.profile.grid import GridFacts, links_chunks
from picbench.profile.reuse import ArmSimulation, RequestReuse, ReuseTotals
from picbench.profile.traces import Trace, TracedRequest

#: Thousands of tokens of a step from which on each costs more: a GPU computes a few hundred while
#: its host starts them. Fitted costs say from which of them on, for arms of either kind.
KNOTS = (0.5, 1.0)

#: The budget of a step where no grid says another one: that of a served vLLM on a large GPU.
STEP_TOKENS = 8192

#: Thousands of computed tokens that may cost more each than the following ones, without graphs.
_FIRST = 0.128


def _beyond_knots(thousands: float) -> tuple[float, ...]:
    """How many thousands of a step's tokens are beyond each knot."""
    return tuple(max(0.0, thousands - knot) for knot in KNOTS)


class RequestSize(NamedTuple):
    """A request: tokens of its prompt, those computed for it, its chunks, tokens of its reply.

    `compiled` of the computed tokens are those of chunks, which attend to nothing but their chunk;
    `chunk_tokens` is the mean length of a chunk.
    """

    prompt: float
    computed: float
    compiled: float
    chunks: float
    chunk_tokens: float
    output: float

    @property
    def jobs(self) -> float:
        """Chunks that are compiled."""
        return self.compiled / self.chunk_tokens if self.chunk_tokens else 0.0

    def prefill(self) -> tuple[float, ...]:
        """The factors of a request's costs, without those of its steps and its reply.

        One is computed tokens times the tokens that they may attend to, in millions.
        """
        own = (self.computed - self.compiled) * self.prompt
        pairs = (own + self.compiled * self.chunk_tokens) / 1e6
        return 1.0, self.computed / 1e3, pairs, self.prompt / 1e3, self.chunks, self.jobs

    def first_token(self, graph_tokens: int) -> tuple[float, ...]:
        """The factors of the costs of the time to the first token, for a request alone.

        On a GPU a step takes no less than the host needs to start it: more where chunks are
        compiled, and where it has more than the `graph_tokens` that CUDA graphs serve, so that its
        kernels are started one by one.
        """
        computed = self.computed / 1e3
        started = float(self.computed > graph_tokens) if graph_tokens else min(_FIRST, computed)
        return *self.prefill(), min(1.0, self.jobs), started, *_beyond_knots(computed)


def mean_size(sizes: Iterable[RequestSize]) -> RequestSize:
    """The mean of each number. Raises StatisticsError for no requests."""
    return RequestSize(*map(fmean, zip(*sizes, strict=True)))


class HeldBlocks:
    """The blocks of the requests that were added and not dropped: shared ones count once."""

    def __init__(self) -> None:
        self.peak = self._blocks = 0
        self._users: Counter[int | bytes] = Counter()

    def add(self, request: RequestReuse, sign: int = 1) -> None:
        """Count a request that begins; with -1 leave out one that has ended."""
        self._blocks += sign * request.own_blocks
        for key, blocks in request.shared:
            before = self._users[key]
            self._users[key] += sign
            if not before or not self._users[key]:
                self._blocks += sign * blocks
            if not self._users[key]:
                del self._users[key]

    def note(self, others: int) -> None:
        """Count a step: the requests hold all their blocks, and `others`, which may be negative."""
        self.peak = max(self.peak, self._blocks + others)


@dataclass(slots=True)
class LoopCounts:
    """What serving all requests takes, in the factors of costs.

    `prefill` sums `RequestSize.prefill`. `prefill_steps` compute tokens of prompts, `started` of
    them have more tokens than CUDA graphs serve, and `beyond` are thousands of tokens of prompts
    that steps have beyond each knot. `replies` are the generated tokens without the first of each
    request, `read` thousands of tokens whose KV they read.
    """

    prefill: tuple[float, ...] = ()
    prefill_steps: float = 0.0
    started: float = 0.0
    beyond: tuple[float, ...] = (0.0,) * len(KNOTS)
    steps: float = 0.0
    replies: float = 0.0
    read: float = 0.0
    requests: int = 0

    def costs(self) -> tuple[float, ...]:
        """The factors of all costs of the loop."""
        return (*self.prefill, *self.step_costs())

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


#: What is pushed: a request, and what it holds; None if nothing comes any more.
_Pushed = tuple[RequestSize, RequestReuse | None] | None


class ClosedLoop:
    """Serves requests in their order, `running` at a time, in steps of at most `budget` tokens.

    CUDA graphs serve steps of up to `graph_tokens`, 0 without graphs. Requests are pushed one by
    one; `counts` and `held` are complete after `close`.
    """

    def __init__(self, running: int, budget: int, graph_tokens: int = 0) -> None:
        self.counts = LoopCounts()
        self.held = HeldBlocks()
        self._running, self._budget, self._graphs = running, budget, graph_tokens
        self._prompts = 0.0
        self._live: list[_Live] = []
        self._next: _Pushed = None
        self._steps = self._serve_all()
        next(self._steps)

    def push(self, size: RequestSize, reuse: RequestReuse | None = None) -> None:
        """The next request, and what it holds, if that is to be counted."""
        self._steps.send((size, reuse))

    def close(self) -> LoopCounts:
        """Serve what is left."""
        with suppress(StopIteration):
            self._steps.send(None)
        return self.counts

    def _serve_all(self) -> Generator[None, _Pushed, None]:
        """Run steps until they need to know the next request; it is always known whether one is."""
        self._next = yield
        while self._live or self._next is not None:
            full = self._next is None or len(self._live) >= self._running
            if self._live and full and all(request.prompt <= 0 for request in self._live):
                self._generate(min(request.reply for request in self._live))
            else:
                yield from self._mixed()
            # Blocks in the middle of a step; those of a reply come as it grows.
            self.held.note(sum(r.compiling - int(r.reply // BLOCK_SIZE) for r in self._live))
            for request in self._live:
                request.compiling = 0
                if request.reply <= 0 and request.reuse is not None:
                    self.held.add(request.reuse, -1)
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

    def _mixed(self) -> Generator[None, _Pushed, None]:
        """One step, in which requests may be admitted."""
        counts, room = self.counts, float(self._budget)
        counts.steps += 1
        self._prompts = 0.0
        for request in self._live:
            room -= self._serve(request, room)
        while room > 0 and self._next is not None and len(self._live) < self._running:
            request = self._admit(*self._next)
            self._next = yield
            room -= self._serve(request, room)
            self._live.append(request)
        if self._prompts > 0:
            counts.prefill_steps += 1
            counts.started += 0 < self._graphs < self._budget - room
            counts.beyond = _sum(counts.beyond, _beyond_knots(self._prompts / 1e3))

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

    def _admit(self, size: RequestSize, reuse: RequestReuse | None) -> _Live:
        counts, own = self.counts, size.prefill()
        counts.prefill = _sum(counts.prefill, own) if counts.prefill else own
        counts.requests += 1
        compiling = 0
        if reuse is not None:
            self.held.add(reuse)
            compiling = reuse.compile_blocks
        computed, output = max(1.0, size.computed), max(1.0, size.output)
        return _Live(computed, output, size.prompt + 1, reuse, compiling)


def _sum(one: tuple[float, ...], other: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(map(add, one, other))


def serve_loop(
    sizes: Iterable[RequestSize], running: int, budget: int, graph_tokens: int = 0
) -> LoopCounts:
    """What serving these requests counts; see `ClosedLoop`."""
    loop = ClosedLoop(running, budget, graph_tokens)
    for size in sizes:
        loop.push(size)
    return loop.close()


@dataclass(slots=True)
class TrafficSums:
    """Sums over a trace: tokens, chunks, occurrences; `first` and `last` arrival in seconds."""

    requests: int = 0
    prompt: int = 0
    output: int = 0
    chunks: int = 0
    chunk_tokens: int = 0
    first: float | None = None
    last: float | None = None
    contents: set[int] = field(default_factory=set)
    contents_tokens: int = 0

    def add(self, request: TracedRequest) -> None:
        """Count a request; DataError where only some requests have times."""
        if self.requests and (request.arrival is None) != (self.last is None):
            raise DataError(
                f"{request.source}: field 'arrival': some requests have a time and some have none",
                hint="give all of them one, or none",
            )
        self.first = request.arrival if self.first is None else self.first
        self.last = request.arrival
        self.requests += 1
        self.prompt += request.prompt_tokens
        self.output += request.output
        for segment in request.segments:
            if not segment.chunk:
                continue
            self.chunks += 1
            self.chunk_tokens += segment.length
            if segment.content is None or segment.content not in self.contents:
                self.contents_tokens += segment.length
            if segment.content is not None:
                self.contents.add(segment.content)

    @property
    def repeated(self) -> float:
        """The share of chunk tokens in chunks that occurred before."""
        return 1 - self.contents_tokens / self.chunk_tokens if self.chunk_tokens else 0.0

    @property
    def rate(self) -> float | None:
        """Requests a second; None without times. Clocks may begin anywhere."""
        if self.first is None or self.last is None or self.last <= self.first:
            return None
        return (self.requests - 1) / (self.last - self.first)


@dataclass(frozen=True, slots=True)
class ArmProfile:
    """What an arm reuses: with a pool that never evicts, and with the pool that was given.

    `peak_blocks` are held by the requests that run at the same time, in a pool that never evicts.
    `sizes` are those of the requests that are counted, `loop` is what serving them takes.
    """

    algorithm: Algorithm
    unbounded: ReuseTotals
    limited: ReuseTotals | None
    peak_blocks: int
    sizes: Sequence[RequestSize] = field(default=(), repr=False, compare=False)
    loop: LoopCounts = field(default_factory=LoopCounts, repr=False, compare=False)

    @property
    def counted(self) -> ReuseTotals:
        """With the pool that was given, or else without a limit."""
        return self.limited or self.unbounded


@dataclass(frozen=True, slots=True)
class TraceProfile:
    """The arms of a trace, in the order that they were asked for."""

    name: str
    kind: str
    exact: bool
    pool: int | None
    running: int
    traffic: TrafficSums
    arms: tuple[ArmProfile, ...]


def profile_trace(
    name: str,
    trace: Trace,
    algorithms: Sequence[Algorithm],
    *,
    pool: int | None = None,
    running: int = 16,
    facts: GridFacts | None = None,
    requests: int | None = None,
) -> TraceProfile:
    """Count what each algorithm reuses of the first `requests`, all of them by default.

    `pool` is in usable blocks of 16 tokens. `running` requests are served at a time, in steps like
    those of the engines of a grid with these `facts`. Raises ConfigError for algorithms that are
    not counted, DataError as the trace does, and where it has no request.
    """
    arms = [_Arm(algorithm, pool, running, facts, exact=trace.exact) for algorithm in algorithms]
    traffic = TrafficSums()
    for request in islice(trace.requests, requests):
        traffic.add(request)
        for arm in arms:
            arm.serve(request)
    if not traffic.requests:
        raise DataError(f"{name}: no requests", hint="a trace has one a line")
    found = tuple(arm.profile() for arm in arms)
    return TraceProfile(name, trace.kind, trace.exact, pool, running, traffic, found)


class _Arm:
    """An arm while the trace is read."""

    def __init__(
        self,
        algorithm: Algorithm,
        pool: int | None,
        running: int,
        facts: GridFacts | None,
        *,
        exact: bool,
    ) -> None:
        graphs = facts.captured(linked=links_chunks(algorithm)) if facts else 0
        self._algorithm = algorithm
        self._unbounded = ArmSimulation(algorithm, exact=exact)
        self._limited = ArmSimulation(algorithm, exact=exact, blocks=pool) if pool else None
        self._loop = ClosedLoop(running, facts.step_tokens if facts else STEP_TOKENS, graphs)
        self._sizes: list[RequestSize] = []

    def serve(self, request: TracedRequest) -> None:
        held = found = self._unbounded.serve(request)
        if self._limited is not None:
            found = self._limited.serve(request)
        if found is None:
            return
        lengths = [segment.length for segment in request.segments if segment.chunk]
        mean = sum(lengths) / len(lengths) if lengths else 0.0
        size = RequestSize(
            found.prompt, found.computed, found.compiled, len(lengths), mean, request.output
        )
        self._sizes.append(size)
        self._loop.push(size, held)

    def profile(self) -> ArmProfile:
        limited = self._limited.close() if self._limited else None
        loop, peak = self._loop.close(), self._loop.held.peak
        return ArmProfile(
            self._algorithm, self._unbounded.close(), limited, peak, self._sizes, loop
        )
