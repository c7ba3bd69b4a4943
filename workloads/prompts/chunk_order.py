"""The order in which prompts send their chunks, so that they begin as earlier ones did."""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby

#: A segment of a prompt: whether it is a chunk, what tells it apart, its tokens.
Ordered = tuple[bool, Hashable, int]


class _Context(dict[Hashable, "_Context"]):
    """What followed a beginning that prompts have in common, the first one first."""


class ContextIndex:
    """The orders that prompts were sent in, whatever tells their segments apart."""

    def __init__(self) -> None:
        self._sent = _Context()
        self._uses: Counter[Hashable] = Counter()
        self._first: dict[Hashable, int] = {}

    def arrange(self, items: Sequence[Ordered]) -> list[int]:
        """The places of a prompt's segments in the order to send them in; see
        `reorder` in `picbench.run.schedule`."""
        order = list(self._arranged(items))
        self.note([items[place] for place in order])
        return order

    def note(self, items: Iterable[Ordered]) -> None:
        """Remember a prompt as it is sent."""
        at = self._sent
        chunks = set()
        for chunk, name, _ in items:
            at = at.setdefault(name, _Context())
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
                at = at.get(items[place][1]) if at else None
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
        for name in reversed([name for name in context if name in given]):
            if name not in path:
                waiting.append((context[name], (*path, name), length + given[name]))
    return best
