"""The host tier's memory: which rows of it hold which chunk, and which are being copied.

Memory is allocated once and divided into rows of one size, each for a block's KV in all layers. A
chunk takes any rows, so nothing fragments. Rows that are being copied from or to are never
handed out again before that has ended, whatever is evicted or cleared meanwhile.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from picbench.engines.chunk_cache.tiers.guarded_tier import Counters
from picbench.engines.planning.keys import Key


@dataclass(slots=True, eq=False)
class Extent:
    """The rows of one chunk, in the order of its pages; `users` of them copy now.

    Only `filled` ones are found. The rows of one that is no longer `listed` are free without users.
    """

    name: Key
    rows: tuple[int, ...]
    users: int = 1
    filled: bool = False
    listed: bool = True


class Arena:
    """Rows of `row_bytes` in `capacity` bytes, least recently used chunk out first.

    Callers `release` what `find` and `reserve` return. One thread keeps the books, others may copy.
    `evicted` is called with the name of each chunk that goes for another one.
    """

    def __init__(
        self, capacity: int, row_bytes: int, evicted: Callable[[Key], None] = lambda _: None
    ) -> None:
        self.rows = capacity // row_bytes
        self.capacity = capacity
        self._row_bytes = row_bytes
        self._evicted = evicted
        self._extents: OrderedDict[Key, Extent] = OrderedDict()
        self._filling: dict[Key, Extent] = {}
        # Rows from `_fresh` on were never used; neither they nor the freed ones are anyone's.
        self._fresh = 0
        self._freed: list[int] = []
        self._idle = 0
        self._counts = Counter[str]()

    def __contains__(self, name: Key) -> bool:
        """Whether a chunk can be read; does not count as use."""
        return name in self._extents

    def is_filling(self, name: Key) -> bool:
        """Whether rows are being filled with a chunk."""
        return name in self._filling

    def find(self, name: Key, pages: int) -> Extent | None:
        """The extent of a chunk of which `pages` are going to be read; None if it is not there."""
        extent = self._extents.get(name)
        if extent is None:
            self._counts["misses"] += 1
            return None
        self._counts["hits"] += 1
        self._counts["bytes_read"] += pages * self._row_bytes
        self._extents.move_to_end(name)
        if not extent.users:
            self._idle -= len(extent.rows)
        extent.users += 1
        return extent

    def touch(self, name: Key) -> bool:
        """Make a chunk the last to be evicted; False if it is not there."""
        if name in self._extents:
            self._extents.move_to_end(name)
        return name in self._extents

    def reserve(self, name: Key, count: int) -> Extent | None:
        """Rows for a new chunk, at the cost of the least recently used; None without enough."""
        assert name not in self._extents and name not in self._filling
        if self._free + self._idle < count:
            self._counts["refused"] += 1
            return None
        for extent in [extent for extent in self._extents.values() if not extent.users]:
            if self._free >= count:
                break
            self._drop(extent)
            self._evicted(extent.name)
        extent = Extent(name, tuple(self._take(count)))
        self._filling[name] = extent
        return extent

    def commit(self, extent: Extent) -> None:
        """The rows hold the chunk now: others may read it."""
        del self._filling[extent.name]
        extent.filled = True
        self._counts["stored"] += 1
        self._counts["bytes_written"] += len(extent.rows) * self._row_bytes
        if extent.listed:
            self._extents[extent.name] = extent

    def release(self, extent: Extent) -> Sequence[int]:
        """End a use; the rows that are free by that: of an extent never filled, or forgotten."""
        extent.users -= 1
        if extent.users:
            return ()
        if not extent.filled:
            del self._filling[extent.name]
        if extent.filled and extent.listed:
            self._idle += len(extent.rows)
            return ()
        self._freed.extend(reversed(extent.rows))
        return extent.rows

    def clear(self) -> None:
        """Forget all chunks, those that are being filled, too."""
        self.erase([*self._extents, *self._filling])

    def erase(self, names: Iterable[Key]) -> list[int]:
        """Forget chunks, also while they are filled or read; all rows that are free."""
        for name in names:
            if (extent := self._extents.get(name)) is not None:
                self._drop(extent)
            if (filling := self._filling.get(name)) is not None:
                filling.listed = False
        return list(self._freed)

    @property
    def held_bytes(self) -> int:
        """Bytes of rows that are someone's, those that are being filled included."""
        return (self._fresh - len(self._freed)) * self._row_bytes

    def counters(self) -> Counters:
        """What was done so far, chunk by chunk."""
        return Counters(**self._counts)

    @property
    def _free(self) -> int:
        return self.rows - self._fresh + len(self._freed)

    def _drop(self, extent: Extent) -> None:
        del self._extents[extent.name]
        extent.listed = False
        if not extent.users:
            self._idle -= len(extent.rows)
            self._freed.extend(reversed(extent.rows))

    def _take(self, count: int) -> Iterator[int]:
        """Rows one after the other as far as possible: freed ones, the latest first, then fresh."""
        for _ in range(count):
            if self._freed:
                yield self._freed.pop()
            else:
                yield self._fresh
                self._fresh += 1


def runs(rows: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Consecutive rows as (first row, its index in `rows`, how many)."""
    begin = 0
    for index in range(1, len(rows) + 1):
        if index == len(rows) or rows[index] != rows[index - 1] + 1:
            yield rows[begin], begin, index - begin
            begin = index
