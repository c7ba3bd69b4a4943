"""What a request's first token takes: factors of costs, and costs that other machines correct.

A time is a sum of costs that cannot be negative, each multiplied by a factor: requests, computed
tokens, the tokens that these attend to, tokens of the prompt, chunks, and steps' own.
"""

from collections.abc import Iterable, Sequence
from operator import mul
from statistics import fmean
from typing import NamedTuple

#: Thousands of tokens of a step from which on each costs more: a GPU computes a few hundred while
#: its host starts them. Fitted costs say from which of them on, for arms of either kind.
KNOTS = (0.5, 1.0)

#: Thousands of computed tokens that may cost more each than the following ones, without graphs.
_FIRST = 0.128


def beyond_knots(thousands: float) -> tuple[float, ...]:
    """How many thousands of a step's tokens are beyond each knot."""
    return tuple(max(0.0, thousands - knot) for knot in KNOTS)


def step_factors(
    prefill: tuple[float, ...], tokens: float, jobs: float, graph_tokens: int
) -> tuple[float, ...]:
    """The factors of a step that computes so many tokens, those of `RequestSize.prefill` first.

    On a GPU a step takes no less than the host needs to start it: more where chunks are compiled,
    and where it has more than the `graph_tokens` that CUDA graphs serve, so that its kernels are
    started one by one.
    """
    thousands = tokens / 1e3
    started = float(tokens > graph_tokens) if graph_tokens else min(_FIRST, thousands)
    return *prefill, min(1.0, jobs), started, *beyond_knots(thousands)


class StepCosts(NamedTuple):
    """Seconds for each factor of `step_factors`: a request, thousands of computed tokens, ...

    `pairs` are millions of computed tokens times the tokens that they may attend to, `prompt` and
    those beyond the two knots are thousands of tokens.
    """

    request: float
    tokens: float
    pairs: float
    prompt: float
    chunks: float
    jobs: float
    compiling: float
    start: float
    beyond_first: float
    beyond_second: float

    def of_token(self, prompt: float) -> float:
        """What one computed token more takes in a prompt of so many."""
        beyond = zip(KNOTS, (self.beyond_first, self.beyond_second), strict=True)
        thousand = self.tokens + sum(cost for knot, cost in beyond if prompt > 1e3 * knot)
        return thousand / 1e3 + self.pairs * prompt / 1e6

    def of_compile(self, tokens: float) -> float:
        """What compiling a chunk takes that attends to nothing but itself."""
        return self.jobs + self.tokens * tokens / 1e3 + self.pairs * tokens**2 / 1e6


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
        """The factors of the costs of the time to the first token, for a request alone."""
        return step_factors(self.prefill(), self.computed, self.jobs, graph_tokens)

    @classmethod
    def mean(cls, sizes: Iterable["RequestSize"]) -> "RequestSize":
        """The mean of each number. Raises StatisticsError for no requests."""
        return cls(*map(fmean, zip(*sizes, strict=True)))


def total(costs: Sequence[float], factors: Sequence[float]) -> float:
    """The sum of the costs, each multiplied by its factor."""
    return sum(map(mul, costs, factors), 0.0)


class CostModel(NamedTuple):
    """Costs that were fitted, and the range of the sizes that they were fitted to."""

    costs: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]

    def predict(self, counts: Sequence[float]) -> float:
        """The sum of the costs, each multiplied by its factor."""
        return total(self.costs, counts)

    def covers(self, sizes: Sequence[float]) -> bool:
        """Whether sizes are within what was measured, in every respect."""
        found = zip(self.low, sizes, self.high, strict=True)
        return all(low * 0.99 <= value <= high * 1.01 for low, value, high in found)
