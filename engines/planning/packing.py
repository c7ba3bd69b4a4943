"""Pages of computed tokens: packed in logical order, keyed by everything before them.

Nothing here imports torch or vllm.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from picbench.engines.planning.keys import ChunkEvent, Key, computed_key, root_key
from picbench.engines.planning.pages import GAP, Page, SlotKind


class ComputedToken(NamedTuple):
    """A token that a request computes."""

    token: int
    position: int
    kind: SlotKind


def pack(
    tokens: Sequence[ComputedToken],
    size: int,
    scope: str,
    *,
    events: Sequence[ChunkEvent] = (),
    prefix_keys: Sequence[Key] = (),
) -> Iterator[Page]:
    """Pack tokens into pages of `size`; full ones are keyed by the whole logical prefix.

    `events` are the chunks among them, and the first pages have `prefix_keys`.
    """
    key, seen = root_key(scope), 0
    ids, positions, kinds = zip(*tokens, strict=True) if tokens else ((), (), ())
    for index, begin in enumerate(range(0, len(tokens), size)):
        page = slice(begin, begin + size)
        last = _last(positions[page])
        upto = bisect_right(events, last, lo=seen, key=lambda event: event.start)
        if index < len(prefix_keys):
            key = prefix_keys[index]
        else:
            key = computed_key(key, ids[page], positions[page], events[seen:upto])
        seen = upto
        full = begin + size <= len(tokens)
        yield Page(ids[page], positions[page], kinds[page], key if full else None)


@dataclass(frozen=True, slots=True)
class AnchorText:
    """The tokens that a chunk is compiled after, whose KV is discarded.

    They are an anchor, the text of the chunk's document before it, or both. Pages are made only for
    a compile: a document may be long, and most requests find the chunk resident. The first
    pages have `prefix_keys`.
    """

    tokens: tuple[int, ...]
    size: int
    scope: str
    prefix_keys: tuple[Key, ...] = ()

    @property
    def blocks(self) -> int:
        """The number of pages."""
        return -(-len(self.tokens) // self.size)

    def pages(self) -> tuple[Page, ...]:
        """The pages; hidden slots fill the last one, so that the chunk begins with a block."""
        tokens = [ComputedToken(t, i, SlotKind.PROMPT) for i, t in enumerate(self.tokens)]
        fill = self.blocks * self.size - len(tokens)
        tokens += [ComputedToken(self.tokens[-1], GAP, SlotKind.PAD)] * fill if tokens else []
        return tuple(pack(tokens, self.size, self.scope, prefix_keys=self.prefix_keys))


def _last(positions: Sequence[int]) -> int:
    """The last visible position; they ascend, and gaps come last."""
    return positions[-1] if positions[-1] != GAP else max(p for p in positions if p != GAP)


def pack_picked(
    count: int, token: int, tokens: Sequence[ComputedToken], size: int
) -> Iterator[Page]:
    """Pack slots reserved for `count` picked tokens, and computed tokens, into pages without keys.

    In reserved slots, `token` stands for any other.
    """
    every = [ComputedToken(token, GAP, SlotKind.LINKED)] * count + list(tokens)
    for begin in range(0, len(every), size):
        ids, positions, kinds = zip(*every[begin : begin + size], strict=True)
        yield Page(ids, positions, kinds, None)
