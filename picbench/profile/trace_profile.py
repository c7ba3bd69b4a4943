"""Profile a trace: all arms in one pass over its requests."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from picbench.engines.algorithms import Algorithm
from picbench.errors import DataError
from picbench.grid.measured_grid import GridFacts
from picbench.profile.prediction.arm_kinds import links_chunks
from picbench.profile.prediction.closed_loop import ClosedLoop, LoopCounts
from picbench.profile.prediction.graph_sizes import captured
from picbench.profile.prediction.request_sizes import RequestSize, RequestSizes
from picbench.profile.reuse.arm_simulation import ArmSimulation
from picbench.profile.reuse.reuse_counts import RequestReuse, ReuseTotals
from picbench.profile.traces.trace_reader import Trace
from picbench.profile.traces.traced_request import TracedRequest

#: The budget of a step where no grid says another one: that of a served vLLM on a large GPU.
STEP_TOKENS = 8192


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
    sizes: RequestSizes = field(default_factory=RequestSizes, repr=False, compare=False)
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
    arms = [
        _Arm(algorithm, pool, _loop(algorithm, running, facts), exact=trace.exact)
        for algorithm in algorithms
    ]
    traffic = TrafficSums()
    for request in _first(trace.requests, requests):
        traffic.add(request)
        for arm in arms:
            arm.serve(request)
    if not traffic.requests:
        raise DataError(f"{name}: no requests", hint="a trace has one a line")
    found = tuple(arm.profile() for arm in arms)
    return TraceProfile(name, trace.kind, trace.exact, pool, running, traffic, found)


def _loop(algorithm: Algorithm, running: int, facts: GridFacts | None) -> ClosedLoop:
    if facts is None:
        return ClosedLoop(running, STEP_TOKENS)
    return ClosedLoop(running, facts.step_tokens, captured(facts, linked=links_chunks(algorithm)))


class _Arm:
    def __init__(
        self, algorithm: Algorithm, pool: int | None, loop: ClosedLoop, *, exact: bool
    ) -> None:
        self._algorithm = algorithm
        self._unbounded = ArmSimulation(algorithm, exact=exact)
        self._limited = ArmSimulation(algorithm, exact=exact, blocks=pool) if pool else None
        self._loop = loop
        self._sizes = RequestSizes()

    def serve(self, request: TracedRequest) -> None:
        held = found = self._unbounded.serve(request)
        if self._limited is not None:
            found = self._limited.serve(request)
        if found is not None:
            size = _size(found, request)
            self._sizes.add(size)
            self._loop.push(size, held)

    def profile(self) -> ArmProfile:
        limited = self._limited.close() if self._limited else None
        loop, peak = self._loop.close(), self._loop.held.peak
        return ArmProfile(
            self._algorithm, self._unbounded.close(), limited, peak, self._sizes, loop
        )


def _size(found: RequestReuse, request: TracedRequest) -> RequestSize:
    lengths = [segment.length for segment in request.segments if segment.chunk]
    return RequestSize(
        prompt=found.prompt,
        computed=found.computed,
        compiled=found.compiled,
        chunks=len(lengths),
        chunk_tokens=sum(lengths) / len(lengths) if lengths else 0.0,
        output=request.output,
    )


def _first(requests: Iterator[TracedRequest], count: int | None) -> Iterator[TracedRequest]:
    return requests if count is None else islice(requests, count)
