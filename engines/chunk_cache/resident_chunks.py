"""Chunks as objects over the engine's block pool: looked up, used, pinned and evicted as a whole.

There is one pool and one order of eviction for chunk and prefix KV: the engine's least-recently-
used queue of blocks that nobody references. A chunk stands in it where its last use put it, with
all of its blocks, so neither kind of traffic can starve the other: whichever was used last stays.
When the queue gives away one block of a chunk, the chunk is gone for lookups, and its other blocks
are the next to be given away. Blocks that a request or a pin references are never given away.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from picbench.engines.planning.keys import Key
from picbench.engines.planning.plan import Canonical


class Blocks(Protocol):
    """The block pool as the coordinator needs it; keys are those of canonical pages."""

    def resident(self, key: Key) -> bool:
        """Whether a block holds the page."""

    def in_use(self, key: Key) -> bool:
        """Whether somebody references the page's block."""

    def refresh(self, keys: Iterable[Key]) -> None:
        """Make idle pages the last to be evicted."""

    def discard(self, keys: Iterable[Key]) -> None:
        """Forget idle pages and make their blocks the first to be handed out."""

    def block_ids(self, keys: Iterable[Key]) -> tuple[int, ...]:
        """Block ids of resident pages."""


@dataclass(slots=True)
class ChunkRecord:
    """A chunk whose KV is in the pool. `last_use` is in seconds of the coordinator's clock.

    `pages` are left of `size` ones: a page that nobody maps may go while the others are used.
    """

    key: Key
    pages: tuple[Key, ...]
    size: int
    tokens: int
    hits: int = 0
    last_use: float = 0.0


@dataclass(frozen=True, slots=True)
class EvictedChunk:
    """A whole chunk that is about to lose its blocks; until the step runs they hold its KV."""

    key: Key
    blocks: tuple[int, ...]


@dataclass(slots=True)
class ResidentChunks:
    """The chunks of one pool. `demote` is called with each whole chunk that is evicted."""

    blocks: Blocks
    demote: Callable[[EvictedChunk], None]
    clock: Callable[[], float] = time.monotonic
    _chunks: dict[Key, ChunkRecord] = field(default_factory=dict)
    _owners: dict[Key, set[Key]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._chunks)

    def __iter__(self) -> Iterator[ChunkRecord]:
        return iter(self._chunks.values())

    def find(self, key: Key) -> ChunkRecord | None:
        """The chunk with this key, if it is in the pool."""
        return self._chunks.get(key)

    def whole(self, key: Key) -> bool:
        """Whether a chunk is in the pool with all of its blocks; one lookup, however long it is."""
        chunk = self._chunks.get(key)
        return chunk is not None and len(chunk.pages) == chunk.size

    def add(self, canonical: Canonical) -> ChunkRecord:
        """A chunk has been compiled or fetched: from now on it is one object."""
        known = self._chunks.get(canonical.key)
        if known is not None:
            self._disown(known)
        tokens = sum(page.real for page in canonical.pages)
        size = len(canonical.pages)
        chunk = ChunkRecord(canonical.key, (), size, tokens, last_use=self.clock())
        if known is not None:
            chunk.hits = known.hits
        self._chunks[canonical.key] = chunk
        self._own(chunk, (page.name for page in canonical.pages))
        return chunk

    def use(self, canonicals: Iterable[Canonical]) -> None:
        """A request maps chunks: pages that it has no use for age with those that it has.

        A page that a chunk lost and another chunk brought back is the chunk's own again.
        """
        now = self.clock()
        for canonical in canonicals:
            chunk = self._chunks.get(canonical.key)
            if chunk is not None:
                chunk.hits += 1
                chunk.last_use = now
                if len(chunk.pages) < chunk.size:
                    self._own(
                        chunk, filter(self.blocks.resident, (p.name for p in canonical.pages))
                    )
                self.blocks.refresh(canonical.unused)

    def owns(self, page: Key) -> bool:
        """Whether a page belongs to a chunk."""
        return page in self._owners

    def evicted(self, page: Key) -> None:
        """The pool gives a page's block away: let go of every chunk that is not whole without it.

        A chunk in use keeps the blocks that are referenced; it only loses a page that nobody maps.
        """
        for key in tuple(self._owners.get(page, ())):
            chunk = self._chunks[key]
            if self._in_use(chunk):
                chunk.pages = tuple(p for p in chunk.pages if p != page)
                self._owners[page].discard(key)
            else:
                self._evict(chunk)
        if not self._owners.get(page, True):
            del self._owners[page]

    def drop(self, key: Key) -> bool:
        """Give up an idle chunk; False if it is in use or not there."""
        chunk = self._chunks.get(key)
        if chunk is None or self._in_use(chunk):
            return False
        self._forget(chunk)
        return True

    def reset(self) -> None:
        """The pool was emptied."""
        self._chunks.clear()
        self._owners.clear()

    def _in_use(self, chunk: ChunkRecord) -> bool:
        """Whether somebody maps a chunk; pages that begin another chunk, too, do not tell."""
        own = [page for page in chunk.pages if len(self._owners[page]) == 1]
        return any(map(self.blocks.in_use, own or chunk.pages))

    def _evict(self, chunk: ChunkRecord) -> None:
        if len(chunk.pages) == chunk.size and all(map(self.blocks.resident, chunk.pages)):
            self.demote(EvictedChunk(chunk.key, self.blocks.block_ids(chunk.pages)))
        self._forget(chunk)

    def _forget(self, chunk: ChunkRecord) -> None:
        del self._chunks[chunk.key]
        self.blocks.discard(self._disown(chunk))

    def _own(self, chunk: ChunkRecord, pages: Iterable[Key]) -> None:
        chunk.pages = tuple(pages)
        for page in chunk.pages:
            self._owners.setdefault(page, set()).add(chunk.key)

    def _disown(self, chunk: ChunkRecord) -> Sequence[Key]:
        """Take a chunk's pages off its name; return those that no other chunk has."""
        for page in chunk.pages:
            self._owners[page].discard(chunk.key)
            if not self._owners[page]:
                del self._owners[page]
        return [page for page in chunk.pages if page not in self._owners]
