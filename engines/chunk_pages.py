"""A chunk's pages: as they are compiled, and as the requests that map them see them.

Both are the same in every request but for where the chunk stands, so they are kept: hashing a
chunk and finding out what is linked in each of its pages is most of the work of a plan, and a
scheduler plans on the engine's critical path. Nothing here imports torch or vllm.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from picbench.engines.keys import Key, anchor_key, canonical_key
from picbench.engines.plan import GAP, Page, Slot
from picbench.engines.treatment import Layout, Piece

#: Ways in which a chunk is linked that are kept; an algorithm has one or two for every chunk.
_VIEWS = 8


class _Mapped(NamedTuple):
    """A canonical page as requests map it, `offset` tokens into its chunk.

    `hidden` says of each slot whether the request does not see it; None if it sees all.
    """

    tokens: tuple[int, ...]
    kinds: tuple[Slot, ...]
    key: Key | None
    copy_of: Key | None
    offset: int
    hidden: tuple[bool, ...] | None


@dataclass(frozen=True, slots=True)
class View:
    """What a request maps of a chunk: the indices of the pages `used`, and these pages."""

    used: tuple[int, ...]
    mapped: tuple[_Mapped, ...]

    def at(self, start: int) -> Iterator[Page]:
        """The pages in a prompt in which the chunk starts at this position."""
        last = self.mapped[-1] if self.mapped else None
        every = tuple(range(start, start + last.offset + len(last.tokens))) if last else ()
        for tokens, kinds, key, copy_of, offset, hidden in self.mapped:
            positions = every[offset : offset + len(tokens)]
            if hidden is not None:
                pairs = zip(positions, hidden, strict=True)
                positions = tuple(GAP if gone else position for position, gone in pairs)
            yield Page(tokens, positions, kinds, key, True, copy_of)


@dataclass(slots=True)
class ChunkPages:
    """A chunk's canonical pages, at the positions that they are compiled at, and views of them."""

    pages: tuple[Page, ...]
    tokens: int
    size: int
    _views: dict[tuple[tuple[int, ...], bool], View] = field(default_factory=dict)

    @classmethod
    def of(cls, piece: Piece, anchor: tuple[int, ...], layout: Layout) -> "ChunkPages":
        """The pages of a chunk that is compiled behind `anchor`."""
        pages = tuple(_canonical_pages(piece, anchor, layout))
        return cls(pages, len(piece.tokens), layout.block_size)

    def view(self, linked: tuple[int, ...], *, private: bool) -> View:
        """The chunk without its linked tokens; `private` pages are copies."""
        view = self._views.get((linked, private))
        if view is None:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            view = self._views[linked, private] = self._make_view(frozenset(linked), private)
        return view

    def _make_view(self, linked: frozenset[int], private: bool) -> View:
        used = used_pages(self.tokens, linked, self.size)
        mapped = (_map(self.pages[i], i * self.size, linked, private) for i in used)
        return View(used, tuple(mapped))


class PageCache:
    """Chunks' pages, least recently used out first."""

    def __init__(self, tokens: int = 1 << 21) -> None:
        self._room = tokens
        self._chunks: OrderedDict[tuple[object, ...], ChunkPages] = OrderedDict()

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def tokens(self) -> int:
        """Tokens of the chunks that it knows."""
        return sum(chunk.tokens for chunk in self._chunks.values())

    def find(self, piece: Piece, anchor: tuple[int, ...], layout: Layout) -> ChunkPages:
        """The pages of a chunk that is compiled behind `anchor`."""
        name = (piece.tokens, piece.lead, anchor, layout.scope, layout.block_size)
        chunk = self._chunks.get(name)
        if chunk is not None:
            self._chunks.move_to_end(name)
            return chunk
        self._room -= len(piece.tokens)
        while self._room < 0 and self._chunks:
            _, oldest = self._chunks.popitem(last=False)
            self._room += oldest.tokens
        chunk = self._chunks[name] = ChunkPages.of(piece, anchor, layout)
        return chunk


def used_pages(length: int, linked: frozenset[int], size: int) -> tuple[int, ...]:
    """Pages of a chunk of `length` tokens that hold a token which is not linked."""
    pages = range(-(-length // size))
    full = Counter(index // size for index in linked)
    return tuple(page for page in pages if full[page] < min(size, length - page * size))


def _canonical_pages(piece: Piece, anchor: tuple[int, ...], layout: Layout) -> Iterator[Page]:
    tokens, size = piece.tokens, layout.block_size
    key = anchor_key(layout.scope, anchor)
    for begin in range(0, len(tokens), size):
        part = tokens[begin : begin + size]
        key = canonical_key(key, part)
        first = len(anchor) + begin
        fill = size - len(part)
        yield Page(
            tokens=part + (tokens[-1],) * fill,
            positions=(*range(first, first + len(part)), *(GAP,) * fill),
            kinds=piece.kinds(begin, len(part), Slot.CHUNK) + (Slot.PAD,) * fill,
            key=key,
            canonical=True,
        )


def _map(page: Page, offset: int, linked: frozenset[int], private: bool) -> _Mapped:
    size = len(page.tokens)
    # Most pages of a long chunk are mapped as they are; only the last one may have slots to spare.
    whole = page.positions[-1] != GAP and linked.isdisjoint(range(offset, offset + size))
    if whole and not private:
        return _Mapped(page.tokens, page.kinds, page.key, None, offset, None)
    gone = tuple(p == GAP or offset + i in linked for i, p in enumerate(page.positions))
    own = Slot.PRIVATE if private else Slot.CHUNK
    kinds = tuple(
        Slot.PAD if hidden else own if kind is Slot.CHUNK else kind
        for kind, hidden in zip(page.kinds, gone, strict=True)
    )
    key, copy_of = (None, page.key) if private else (page.key, None)
    return _Mapped(page.tokens, kinds, key, copy_of, offset, gone if any(gone) else None)
