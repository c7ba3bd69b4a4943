"""The steps in which an engine serves requests, so many at a time: vLLM's scheduler, simulated.

A step has a budget of tokens. Running requests go first: one token for each that generates, the
rest of their prompts for the others; then waiting requests are admitted while there is room. Steps
do not depend on how long they take, because a request is sent as soon as another one ends.
"""

from collections.abc import Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass

from picbench.engines.config import BLOCK_SIZE
from picbench.profile.prediction.request_sizes import KNOTS, RequestSize, beyond_knots
from picbench.profile.reuse.held_blocks import HeldBlocks
from picbench.profile.reuse.reuse_counts import RequestReuse


@dataclass(slots=True)
class LoopCounts:
    """What is done for all requests, in the numbers that costs are multiplied by.

    `prefill` sums `RequestSize.prefill`. `prefill_steps` compute tokens of prompts, `started` ones
    of them have more tokens than CUDA graphs serve, and `beyond` are thousands of tokens of prompts
    that steps have beyond each knot. `replies` are generated tokens but the first of each request,
    `read` thousands of tokens whose KV they read.
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
        """What each cost of the whole loop is multiplied by."""
        return (*self.prefill, *self.step_costs())

    def step_costs(self) -> tuple[float, ...]:
        """The costs that steps have, whichever requests they serve."""
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
    compiling: int = 0


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
            if self._settled():
                self._generate(min(request.reply for request in self._live))
            else:
                yield from self._mixed()
            self._leave()

    def _settled(self) -> bool:
        """Whether all that run generate, and none can be admitted."""
        full = self._next is None or len(self._live) >= self._running
        return bool(self._live) and full and all(request.prompt <= 0 for request in self._live)

    def _generate(self, steps: float) -> None:
        count, counts = len(self._live), self.counts
        counts.steps += steps
        counts.replies += steps * count
        contexts = sum(request.context for request in self._live)
        counts.read += (steps * contexts + count * steps * (steps - 1) / 2) / 1e3
        for request in self._live:
            request.reply -= steps
            request.context += steps
        self._note()

    def _mixed(self) -> Generator[None, _Pushed, None]:
        self.counts.steps += 1
        room = float(self._budget)
        self._prompts = 0.0
        for request in self._live:
            room -= self._serve(request, room)
        while room > 0 and self._next is not None and len(self._live) < self._running:
            request = self._admit(*self._next)
            self._next = yield
            room -= self._serve(request, room)
            self._live.append(request)
        if self._prompts > 0:
            self._count_prompts(self._budget - room)
        self._note()
        for request in self._live:
            request.compiling = 0

    def _count_prompts(self, tokens: float) -> None:
        """Count a step of so many `tokens` that computes tokens of prompts."""
        counts, beyond = self.counts, beyond_knots(self._prompts / 1e3)
        counts.prefill_steps += 1
        counts.started += 0 < self._graphs < tokens
        counts.beyond = tuple(a + b for a, b in zip(counts.beyond, beyond, strict=True))

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
        known = counts.prefill or (0.0,) * len(own)
        counts.prefill = tuple(a + b for a, b in zip(known, own, strict=True))
        counts.requests += 1
        if reuse is not None:
            self.held.add(reuse)
        live = _Live(max(1.0, size.computed), max(1.0, size.output), size.prompt + 1, reuse)
        live.compiling = reuse.compile_blocks if reuse is not None else 0
        return live

    def _note(self) -> None:
        """Blocks in the middle of a step; those of a reply come as it grows."""
        self.held.note(sum(r.compiling - int(r.reply // BLOCK_SIZE) for r in self._live))

    def _leave(self) -> None:
        for request in self._live:
            if request.reply <= 0 and request.reuse is not None:
                self.held.drop(request.reuse)
        self._live = [request for request in self._live if request.reply > 0]


def serve_loop(
    sizes: Iterable[RequestSize], running: int, budget: int, graph_tokens: int = 0
) -> LoopCounts:
    """What serving these requests counts; see `ClosedLoop`."""
    loop = ClosedLoop(running, budget, graph_tokens)
    for size in sizes:
        loop.push(size)
    return loop.close()
