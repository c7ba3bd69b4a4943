"""The order of a prompt's chunks that prefix caching has seen most of: the arm `reorder`.

ContextPilot (arXiv 2511.03475, earlier called RAGBoost) keeps an index of the contexts that it sent
and aligns each new one with them. That is what is done here, prompt by prompt in the order of the
run. Not done here: its other part, which puts requests themselves in an order of its own, its
notes to the model about the order that was given (nothing tells the model here), and its
de-duplication between the turns of a conversation. The index does not know what a pool that is too
small has evicted.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from picbench.workloads.sample import Sample, SampleSegment

#: What tells segments apart: their token ids.
_Tokens = tuple[int, ...]


@dataclass(slots=True)
class _Context:
    """What followed a beginning that prompts have in common, the first one first."""

    following: dict[_Tokens, "_Context"] = field(default_factory=dict)


class ChunkOrder:
    """Reorders the chunks of prompts, and remembers what it made of them.

    Deterministic: the same prompts in the same order give the same orders.
    """

    def __init__(self) -> None:
        self._sent = _Context()
        self._uses: Counter[_Tokens] = Counter()
        self._first: dict[_Tokens, int] = {}

    def arrange(self, sample: Sample) -> Sample:
        """The sample with each of its chunks once, in an order that earlier prompts began with.

        Texts stay where they are; chunks change places with those that they stand next to. First
        come the chunks of the longest sequence, in tokens, that followed the same beginning before;
        after them the others, the most used one first, then the one that was seen first. A sample
        whose chunks are consecutive text stays as it is.
        """
        segments = sample.segments if sample.ordered else tuple(self._arranged(sample))
        self._note(segments)
        return replace(sample, segments=segments)

    def _arranged(self, sample: Sample) -> Iterator[SampleSegment]:
        at: _Context | None = self._sent
        used: set[_Tokens] = set()
        for kind, run in groupby(sample.segments, lambda segment: segment.kind):
            found = list(run)
            if kind == "chunk":
                given: dict[_Tokens, SampleSegment] = {}
                for segment in found:
                    if segment.tokens not in used:
                        given.setdefault(segment.tokens, segment)
                found = [given[tokens] for tokens in self._order(given, at)]
                used |= given.keys()
            for segment in found:
                at = at.following.get(segment.tokens) if at else None
                yield segment

    def _order(self, given: Mapping[_Tokens, SampleSegment], at: _Context | None) -> list[_Tokens]:
        begin = _longest(at, given) if at else ()
        rest = [tokens for tokens in given if tokens not in begin]
        return [*begin, *sorted(rest, key=self._rank)]

    def _rank(self, tokens: _Tokens) -> tuple[int, int]:
        return -self._uses[tokens], self._first.get(tokens, len(self._first))

    def _note(self, segments: Sequence[SampleSegment]) -> None:
        at = self._sent
        for segment in segments:
            at = at.following.setdefault(segment.tokens, _Context())
            if segment.kind == "chunk":
                self._first.setdefault(segment.tokens, len(self._first))
        self._uses.update({s.tokens for s in segments if s.kind == "chunk"})


def _longest(at: _Context, given: Mapping[_Tokens, SampleSegment]) -> tuple[_Tokens, ...]:
    """The longest sequence, in tokens, of given chunks that followed; of equal ones the first."""
    best: tuple[_Tokens, ...] = ()
    most = 0
    waiting: list[tuple[_Context, tuple[_Tokens, ...], int]] = [(at, (), 0)]
    while waiting:
        context, path, length = waiting.pop()
        if length > most:
            best, most = path, length
        following = [tokens for tokens in context.following if tokens in given]
        for tokens in reversed(following):
            if tokens not in path:
                waiting.append((context.following[tokens], (*path, tokens), length + len(tokens)))
    return best
