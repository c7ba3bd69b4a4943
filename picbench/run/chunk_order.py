"""The order of a prompt's chunks that prefix caching has seen most of: the arm `reorder`.

ContextPilot (arXiv 2511.03475, earlier called RAGBoost) keeps an index of the contexts that it sent
and aligns each new one with them. That is what is done here, prompt by prompt in the order of the
run. Not done here: its other part, which puts requests themselves in an order of its own, its
notes to the model about the order that was given (nothing tells the model here), and its
de-duplication between the turns of a conversation. The index does not know what a pool that is too
small has evicted.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from picbench.workloads.sample import Sample

#: A segment of a prompt: whether it is a chunk, what tells it apart, its tokens.
Ordered = tuple[bool, Hashable, int]


@dataclass(slots=True)
class _Context:
    """What followed a beginning that prompts have in common, the first one first."""

    following: dict[Hashable, "_Context"] = field(default_factory=dict)


class ChunkOrder:
    """Reorders the chunks of prompts, and remembers what it made of them.

    Deterministic: the same prompts in the same order give the same orders.
    """

    def __init__(self) -> None:
        self._index = ContextIndex()

    def arrange(self, sample: Sample) -> Sample:
        """The sample with each of its chunks once, in an order that earlier prompts began with.

        Texts stay where they are; chunks change places with those that they stand next to. First
        come the chunks of the longest sequence, in tokens, that followed the same beginning before;
        after them the others, the most used one first, then the one that was seen first. A sample
        whose chunks are consecutive text stays as it is.
        """
        items = [(s.kind == "chunk", s.tokens, len(s.tokens)) for s in sample.segments]
        if sample.ordered:
            self._index.note(items)
            return sample
        order = self._index.arrange(items)
        return replace(sample, segments=tuple(sample.segments[place] for place in order))


class ContextIndex:
    """The orders that prompts were sent in, whatever tells their segments apart."""

    def __init__(self) -> None:
        self._sent = _Context()
        self._uses: Counter[Hashable] = Counter()
        self._first: dict[Hashable, int] = {}

    def arrange(self, items: Sequence[Ordered]) -> list[int]:
        """The places of a prompt's segments in the order to send them in; see `ChunkOrder`."""
        order = list(self._arranged(items))
        self.note([items[place] for place in order])
        return order

    def note(self, items: Iterable[Ordered]) -> None:
        """Remember a prompt as it is sent."""
        at = self._sent
        chunks = set()
        for chunk, name, _ in items:
            at = at.following.setdefault(name, _Context())
            if chunk:
                self._first.setdefault(name, len(self._first))
                chunks.add(name)
        self._uses.update(chunks)

    def _arranged(self, items: Sequence[Ordered]) -> Iterator[int]:
        at: _Context | None = self._sent
        used: set[Hashable] = set()
        for chunk, group in groupby(range(len(items)), lambda place: items[place][0]):
            found = list(group)
            if chunk:
                given: dict[Hashable, int] = {}
                for place in found:
                    if items[place][1] not in used:
                        given.setdefault(items[place][1], place)
                lengths = {name: items[place][2] for name, place in given.items()}
                found = [given[name] for name in self._order(lengths, at)]
                used |= given.keys()
            for place in found:
                at = at.following.get(items[place][1]) if at else None
                yield place

    def _order(self, given: Mapping[Hashable, int], at: _Context | None) -> list[Hashable]:
        begin = _longest(at, given) if at else ()
        rest = [name for name in given if name not in begin]
        return [*begin, *sorted(rest, key=self._rank)]

    def _rank(self, name: Hashable) -> tuple[int, int]:
        return -self._uses[name], self._first.get(name, len(self._first))


def _longest(at: _Context, given: Mapping[Hashable, int]) -> tuple[Hashable, ...]:
    """The longest sequence, in tokens, of given chunks that followed; of equal ones the first."""
    best: tuple[Hashable, ...] = ()
    most = 0
    waiting: list[tuple[_Context, tuple[Hashable, ...], int]] = [(at, (), 0)]
    while waiting:
        context, path, length = waiting.pop()
        if length > most:
            best, most = path, length
        following = [name for name in context.following if name in given]
        for name in reversed(following):
            if name not in path:
                waiting.append((context.following[name], (*path, name), length + given[name]))
    return best
