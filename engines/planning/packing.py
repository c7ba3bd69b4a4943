"""Pages of computed tokens: packed in logical order, keyed by everything before them."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from picbench.engines.planning.documents import Context
from picbench.engines.planning.keys import (
    NUMBER,
    ChunkEvent,
    Key,
    computed_key,
    pack_numbers,
    root_key,
)
from picbench.engines.planning.pages import GAP, Page, SlotKind

_Numbers = tuple[int, ...]


@dataclass(slots=True)
class ComputedTokens:
    """Tokens that a request computes: ids, logical positions and kinds, one list each."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    kinds: list[SlotKind] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, token: int, position: int, kind: SlotKind, count: int = 1) -> None:
        """Add a token, `count` times in the same position."""
        self.ids += [token] * count
        self.positions += [position] * count
        self.kinds += [kind] * count

    def add_run(self, ids: Sequence[int], first: int, kind: SlotKind) -> None:
        """Add tokens at consecutive positions from `first` on."""
        self.ids += ids
        self.positions += range(first, first + len(ids))
        self.kinds += [kind] * len(ids)

    def extend(self, others: "ComputedTokens") -> None:
        """Add all of `others`."""
        self.ids += others.ids
        self.positions += others.positions
        self.kinds += others.kinds

    def pages(self, size: int) -> Iterator[tuple[_Numbers, _Numbers, tuple[SlotKind, ...]]]:
        """Ids, positions and kinds of `size` tokens at a time."""
        for begin in range(0, len(self), size):
            page = slice(begin, begin + size)
            yield tuple(self.ids[page]), tuple(self.positions[page]), tuple(self.kinds[page])


def pack(
    tokens: ComputedTokens,
    size: int,
    scope: str,
    *,
    events: Sequence[ChunkEvent] = (),
    prefix_keys: Sequence[Key] = (),
) -> Iterator[Page]:
    """Pack tokens into pages of `size`; full ones are keyed by the whole logical prefix.

    `events` are the chunks among them, and the first pages have `prefix_keys`.
    """
    key, seen, starts = root_key(scope), 0, [event.start for event in events]
    packed_ids, packed_positions = pack_numbers(tokens.ids), pack_numbers(tokens.positions)
    for index, (ids, positions, kinds) in enumerate(tokens.pages(size)):
        # They ascend, and gaps come last.
        last = positions[-1] if positions[-1] != GAP else max(p for p in positions if p != GAP)
        upto = bisect_right(starts, last, lo=seen)
        if index < len(prefix_keys):
            key = prefix_keys[index]
        elif len(ids) == size:
            page = slice(index * size * NUMBER, (index + 1) * size * NUMBER)
            key = computed_key(key, packed_ids[page], packed_positions[page], events[seen:upto])
        seen = upto
        yield Page(ids, positions, kinds, key if len(ids) == size else None)


@dataclass(frozen=True, slots=True)
class AnchorText:
    """The tokens that a chunk is compiled after, whose KV is discarded.

    They are an `anchor`, the `context` of the chunk in its document, or both. Pages are made only
    for a compile: a document may be long, and most requests find the chunk resident. The first
    pages have `prefix_keys`.
    """

    anchor: tuple[int, ...]
    size: int
    scope: str
    prefix_keys: tuple[Key, ...] = ()
    context: Context | tuple[int, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens, in order."""
        return (*self.anchor, *self.context)

    def __len__(self) -> int:
        return len(self.anchor) + len(self.context)

    @property
    def blocks(self) -> int:
        """The number of pages."""
        return -(-len(self) // self.size)

    def pages(self) -> tuple[Page, ...]:
        """The pages; hidden slots fill the last one, so that the chunk begins with a block."""
        ids, tokens = self.tokens, ComputedTokens()
        tokens.add_run(ids, 0, SlotKind.PROMPT)
        if ids:
            tokens.add(ids[-1], GAP, SlotKind.PAD, self.blocks * self.size - len(ids))
        return tuple(pack(tokens, self.size, self.scope, prefix_keys=self.prefix_keys))


def pack_picked(count: int, token: int, tokens: ComputedTokens, size: int) -> Iterator[Page]:
    """Pack slots reserved for `count` picked tokens, and computed tokens, into pages without keys.

    In reserved slots, `token` stands for any other.
    """
    every = ComputedTokens()
    every.add(token, GAP, SlotKind.LINKED, count)
    every.extend(tokens)
    return (Page(ids, positions, kinds, None) for ids, positions, kinds in every.pages(size))
