"""A chunk's canonical pages, the views that requests have of them, and a cache of both.

In every request they are the same up to a shift of positions. Hashing a chunk and marking what is
linked in each page is most of the work of a plan, and the scheduler plans on the engine's critical
path, so the results are kept.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from picbench.engines.planning.keys import Key, canonical_key
from picbench.engines.planning.pages import GAP, ChunkView, Page, SlotKind, names_of
from picbench.engines.planning.policy import LayoutConfig, Segment

Numbers = tuple[int, ...]

#: Views that are kept of a chunk; an algorithm has one or two of each.
_VIEWS = 8


class NamedView(NamedTuple):
    """A view of a chunk, the keys of the pages that it uses, and those of the others."""

    view: ChunkView
    keys: tuple[Key, ...]
    unused: tuple[Key, ...]


@dataclass(slots=True)
class ChunkPages:
    """A chunk's canonical pages, at the positions at which they are compiled, and views of them."""

    pages: tuple[Page, ...]
    tokens: int
    size: int
    _views: dict[tuple[Numbers, bool], NamedView] = field(default_factory=dict)

    @classmethod
    def of(cls, segment: Segment, root: Key, first: int, layout: LayoutConfig) -> "ChunkPages":
        """The pages of a chunk that is compiled from position `first` on.

        `root` is the key of all that it is compiled after, and of a position that it is fixed at.
        """
        pages = tuple(_canonical_pages(segment, root, first, layout))
        return cls(pages, len(segment.tokens), layout.block_size)

    def view(self, linked: Numbers, *, private: bool) -> NamedView:
        """The chunk without its linked tokens; the pages of `private` views are copies."""
        found = self._views.get((linked, private))
        if found is None:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            hidden = frozenset(linked)
            used = used_pages(self.tokens, hidden, self.size)
            mapped = (_map(self.pages[i], i * self.size, hidden, private) for i in used)
            view = ChunkView.of(used, tuple(mapped), self.pages[0].positions[0])
            found = NamedView(view, *names_of(self.pages, view.used))
            self._views[linked, private] = found
        return found


_Name = tuple[object, ...]


class PageCache:
    """Pages of chunks, up to a number of tokens; the least recently used go first.

    `name` makes of token ids what is hashed in their place: bytes are compared at once.
    """

    def __init__(self, tokens: int = 1 << 21, name: Callable[[Numbers], Hashable] = tuple) -> None:
        self._room = tokens
        self._name = name
        self._chunks: dict[_Name, ChunkPages] = {}
        # Names in the order of use, by the object's id: hashing a name goes through its tokens.
        self._names: OrderedDict[int, _Name] = OrderedDict()

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def tokens(self) -> int:
        """Tokens of the chunks in the cache."""
        return sum(chunk.tokens for chunk in self._chunks.values())

    def find(self, segment: Segment, root: Key, first: int, layout: LayoutConfig) -> ChunkPages:
        """The pages that `ChunkPages.of` makes of the same arguments."""
        added = None if segment.plain else (segment.lead, segment.trail, segment.placeholders)
        name = (self._name(segment.tokens), added, root, layout.block_size)
        chunk = self._chunks.get(name)
        if chunk is not None:
            self._names.move_to_end(id(chunk))
            return chunk
        self._room -= len(segment.tokens)
        while self._room < 0 and self._chunks:
            _, oldest = self._names.popitem(last=False)
            self._room += self._chunks.pop(oldest).tokens
        chunk = self._chunks[name] = ChunkPages.of(segment, root, first, layout)
        self._names[id(chunk)] = name
        return chunk


def used_pages(length: int, linked: Iterable[int], size: int) -> tuple[int, ...]:
    """Pages of a chunk of `length` tokens that hold a token which is not linked."""
    pages = range(-(-length // size))
    full = Counter(index // size for index in linked)
    return tuple(page for page in pages if full[page] < min(size, length - page * size))


def _canonical_pages(
    segment: Segment, root: Key, first: int, layout: LayoutConfig
) -> Iterator[Page]:
    tokens, size, key = segment.tokens, layout.block_size, root
    for begin in range(0, len(tokens), size):
        own = tokens[begin : begin + size]
        key = canonical_key(key, own)
        at = first + begin
        fill = size - len(own)
        yield Page(
            tokens=own + (tokens[-1],) * fill,
            positions=(*range(at, at + len(own)), *(GAP,) * fill),
            kinds=segment.kinds(begin, len(own), SlotKind.CHUNK) + (SlotKind.PAD,) * fill,
            key=key,
            canonical=True,
        )


def _map(page: Page, offset: int, linked: frozenset[int], private: bool) -> Page:
    """A canonical page that starts `offset` tokens into its chunk, without the linked ones."""
    slots = range(offset, offset + len(page.tokens))
    key, copy_of = (None, page.key) if private else (page.key, None)
    # Most pages of a long chunk are mapped as they are; only the last one may have slots to spare.
    if page.positions[-1] != GAP and not private and linked.isdisjoint(slots):
        return page if page.positions[0] == offset else page._replace(positions=tuple(slots))
    gone = [p == GAP or slot in linked for slot, p in zip(slots, page.positions, strict=True)]
    own = SlotKind.PRIVATE if private else SlotKind.CHUNK
    kinds = tuple(
        SlotKind.PAD if hidden else own if kind is SlotKind.CHUNK else kind
        for kind, hidden in zip(page.kinds, gone, strict=True)
    )
    positions = tuple(GAP if hid else slot for slot, hid in zip(slots, gone, strict=True))
    return Page(page.tokens, positions, kinds, key, True, copy_of)
