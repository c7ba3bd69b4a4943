"""Traces of three mixes, small enough for a tiny model, and engines' requests made of them."""

from array import array
from collections.abc import Sequence
from random import Random

from picbench.engines.request import Chunk, Request, Text
from picbench.workloads.traffic.trace import ContentTable, TracedRequest, TraceSegment

#: Ids of the tiny model's vocabulary, without its special tokens.
IDS = range(16, 1000)


class Mixes:
    """Traces of `count` requests, drawn from a seed."""

    def __init__(self, seed: int, count: int) -> None:
        self.rng = Random(seed)
        self.table = ContentTable(exact=True)
        self.count = count

    def rag(self) -> list[TracedRequest]:
        """A common instruction, documents by Zipf's law in any order, a question."""
        head = self.text(self.rng.choice((21, 32, 40)))
        documents = [self.chunk(self.rng.choice((17, 32, 45, 80, 96))) for _ in range(12)]
        # One begins like another, as passages of one page do.
        documents.append(self.alike(documents[0], 33))
        weights = [1 / rank for rank in range(1, len(documents) + 1)]
        return [
            self.request(
                head,
                *dict.fromkeys(self.rng.choices(documents, weights, k=4)),
                self.text(self.rng.randint(3, 30)),
            )
            for _ in range(self.count)
        ]

    def articles(self) -> list[TracedRequest]:
        """Chunks of three articles, compiled after what stands before them there."""
        head, chunks = self.text(21), list[TraceSegment]()
        for _ in range(3):
            pieces, before = [self.chunk(self.rng.choice((17, 32, 45))) for _ in range(4)], ()
            for piece in pieces:
                context = self.table.of_tokens(before, chunk=False) if before else None
                chunks.append(piece._replace(before=context))
                before = (*before, *ids(piece))
        return [
            self.request(head, *self.rng.sample(chunks, 3), self.text(self.rng.randint(3, 30)))
            for _ in range(self.count)
        ]

    def agents(self) -> list[TracedRequest]:
        """Agents with a common system prompt, tools as chunks, and a history that grows."""
        system, tools = self.text(70), [self.chunk(48), self.chunk(33)]
        histories: list[list[TraceSegment]] = [[] for _ in range(3)]
        found = []
        for _ in range(self.count):
            history = self.rng.choice(histories)
            history.append(self.text(self.rng.randint(10, 40)))
            found.append(self.request(system, *tools, *history))
        return found

    def nothing(self) -> list[TracedRequest]:
        """Requests that share nothing, some of which have no chunks, or end with one."""
        found = []
        for number in range(self.count):
            chunks = [self.chunk(self.rng.randint(1, 90)) for _ in range(number % 4)]
            tail = [] if number % 5 == 1 else [self.text(self.rng.randint(1, 60))]
            found.append(self.request(*chunks, *tail) if chunks or tail else self.rag()[0])
        return found

    def text(self, length: int) -> TraceSegment:
        return self.table.of_tokens(self.rng.choices(IDS, k=length), chunk=False)

    def chunk(self, length: int) -> TraceSegment:
        return self.table.of_tokens(self.rng.choices(IDS, k=length), chunk=True)

    def alike(self, other: TraceSegment, length: int) -> TraceSegment:
        begin = ids(other)[:16]
        return self.table.of_tokens((*begin, *self.rng.choices(IDS, k=length)), chunk=True)

    def request(self, *segments: TraceSegment) -> TracedRequest:
        return TracedRequest(segments, output=self.rng.choice((1, 1, 2, 18)))


def ids(segment: TraceSegment | None) -> tuple[int, ...]:
    if segment is None:
        return ()
    assert segment.tokens is not None
    return tuple(array("q", segment.tokens))


def to_engine(request: TracedRequest, algorithm: str, order: Sequence[int] = ()) -> Request:
    """The request as an engine takes it, its segments in an order."""
    segments = [request.segments[place] for place in order or range(len(request.segments))]
    parts = [
        Chunk(tokens=ids(s), document=ids(s.before) + ids(s)) if s.chunk else Text(tokens=ids(s))
        for s in segments
    ]
    return Request(parts, algorithm, max_tokens=request.output)
