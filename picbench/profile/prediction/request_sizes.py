"""The sizes of all requests of a trace, as an arm computes them."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

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
