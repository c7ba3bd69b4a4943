"""Which tiles of keys the queries of a step visit, cut into parts that fill the GPU. Host side."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

import numpy as np

from picbench.kernels.cuda.prefill.logical_order import Ints
from picbench.kernels.cuda.prefill.paged.key_tiles import KeyTiles
from picbench.kernels.paging import GAP

#: About what starting and ending a program takes, in visits. Chosen among 1 to 3 by the time of
#: whole kernels, not measured by itself.
START = 2.5

# Parts that a row of queries may be cut into.
_CUTS = (1, 2, 3, 4, 6, 8, 12)


@dataclass(frozen=True, slots=True)
class Visits:
    """Programs and the tiles that they visit, counted from the first tile of the step.

    `work` [n, 7] int32, longest first: first query, count of queries, first visit, counts of visits
    that need a mask, of those that the first half of the rows makes, of all, and number of the
    part. `tiles` int32 are the visits, `parts` [queries] int32 into how many parts each query's
    are cut.
    """

    work: Ints
    tiles: Ints
    parts: Ints

    @classmethod
    def of(
        cls, rows: Sequence["Row"], queries: int, programs: int, most: int = max(_CUTS)
    ) -> "Visits":
        """Cuts rows so that `programs` of them run at once, none into more than `most` parts."""
        cuts = _cut(np.array([row.count for row in rows]), programs, most)
        parts = np.zeros(queries, np.int32)
        work: list[tuple[int, ...]] = []
        begin = 0
        for row, count in zip(rows, cuts, strict=True):
            parts[row.first : row.first + row.queries] = count
            work.extend(row.parts(begin, int(count)))
            begin += row.count
        table = np.array(work, np.int32)
        table = table[np.argsort(-table[:, 5], kind="stable")]
        return cls(table, np.concatenate([row.tiles for row in rows]), parts)

    @property
    def most(self) -> int:
        """The most parts of a query."""
        return int(self.parts.max())


@dataclass(frozen=True, slots=True)
class Row:
    """Consecutive queries that one program serves, and the tiles that they visit.

    The first `masked` of `tiles` are seen in part; the rest as a whole, by both halves of the
    queries, or those behind the first `common` by the second half alone.
    """

    first: int
    queries: int
    tiles: Ints
    masked: int
    common: int

    @property
    def count(self) -> int:
        """Number of visits."""
        return len(self.tiles)

    def parts(self, begin: int, count: int) -> Iterator[tuple[int, ...]]:
        """Rows of `Visits.work` for `count` parts of these visits, which begin at `begin`."""
        for part in range(count):
            start, stop = (self.count * i // count for i in (part, part + 1))
            inside = stop - start
            masked = min(max(self.masked - start, 0), inside)
            common = min(max(self.common - start, 0), inside)
            yield self.first, self.queries, begin + start, masked, common, inside, part


def rows(keys: KeyTiles, qpos: Ints, first: int, base: int, tokens: int) -> Iterator[Row]:
    """Rows of `tokens` queries each, from `first` on, that stand at the positions `qpos`.

    `base` is the number of the request's first tile. A query at GAP, a pad, sees nothing.
    """
    for start in range(0, len(qpos), tokens):
        some = qpos[start : start + tokens]
        yield _row(keys, np.where(some == GAP, -1, some), first + start, base, tokens // 2)


def _row(keys: KeyTiles, qpos: Ints, first: int, base: int, half: int) -> Row:
    early, late = qpos[:half], qpos[half:]
    least = late.min(initial=GAP)
    whole = keys.highest <= qpos.min()
    second = ~whole & (keys.highest <= least) & (keys.lowest > early.max()) & (len(late) > 0)
    partial = ~whole & ~second & (keys.lowest <= qpos.max())
    kinds = [np.flatnonzero(kind) for kind in (partial, whole, second)]
    counts = [len(kind) for kind in kinds]
    tiles = (np.concatenate(kinds) + base).astype(np.int32)
    return Row(first, len(qpos), tiles, counts[0], counts[0] + counts[1])


def _cut(counts: Ints, programs: int, most: int) -> Ints:
    """Parts of each row: those with which `programs` at a time are done first."""
    uncut = np.ones(len(counts), int)
    if len(counts) >= 4 * programs:
        return uncut
    longest = int(counts.max(initial=1))
    choices = [
        np.clip(-(-counts // max(1, -(-longest // cuts))), 1, most)
        for cuts in _CUTS
        if cuts <= most
    ]
    return min(choices, key=lambda parts: _makespan(counts, parts, programs))


def _makespan(counts: Ints, parts: Ints, programs: int) -> float:
    """When the last part is done, if they are started longest first (Graham, 1969)."""
    pieces = np.repeat(counts / parts, parts) + START
    free = [0.0] * programs
    heapify(free)
    for piece in -np.sort(-pieces):
        heapreplace(free, free[0] + float(piece))
    return max(free)
