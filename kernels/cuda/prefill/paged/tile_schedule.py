"""Which key tiles each query tile of a step reads, split so that the GPU is full. Host side."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

import numpy as np

from picbench.kernels.cuda.prefill.paged.key_tiles import KeyTiles
from picbench.kernels.cuda.visible_blocks import Ints
from picbench.kernels.paging import GAP

#: Time to start and end a program, in key tiles. Chosen among 1 to 3 by the time of whole kernels,
#: not measured by itself.
START = 2.5

# Numbers of splits that are tried for a step's longest query tile.
_SPLITS = (1, 2, 3, 4, 6, 8, 12)


@dataclass(frozen=True, slots=True)
class QueryTile:
    """Consecutive queries that one program serves, and the key tiles that they read.

    `key_tiles` [n] int32 are numbers of key tiles, counted from the first one of the step. The
    first `masked` are visible in part and need a mask. Of the others, which are visible as a whole,
    those up to `common` are read by both halves of the queries, the rest by the second half alone.
    """

    first: int
    queries: int
    key_tiles: Ints
    masked: int
    common: int

    @property
    def count(self) -> int:
        """Number of key tiles."""
        return len(self.key_tiles)

    def split(self, begin: int, splits: int) -> Iterator[tuple[int, ...]]:
        """Rows of `TileSchedule.work`, one a split; the key tiles begin at `begin`."""
        for split in range(splits):
            start, stop = (self.count * i // splits for i in (split, split + 1))
            count = stop - start
            masked = min(max(self.masked - start, 0), count)
            common = min(max(self.common - start, 0), count)
            yield self.first, self.queries, begin + start, masked, common, count, split


@dataclass(frozen=True, slots=True)
class TileSchedule:
    """The programs of a step.

    `work` [n, 7] int32 has a row a program, longest first: first query, number of queries, first
    index into `key_tiles`, number of key tiles that need a mask, number read by the first half of
    the queries, number of all, and number of the split. `key_tiles` int32 are the key tiles of all
    query tiles; `splits` [queries] int32 is the number of splits of each query.
    """

    work: Ints
    key_tiles: Ints
    splits: Ints

    @classmethod
    def of(
        cls,
        query_tiles: Sequence[QueryTile],
        queries: int,
        programs: int,
        max_splits: int = max(_SPLITS),
    ) -> "TileSchedule":
        """Splits the query tiles of `queries` queries for a GPU that runs `programs` at once."""
        counts = np.array([tile.count for tile in query_tiles])
        splits = np.zeros(queries, np.int32)
        work: list[tuple[int, ...]] = []
        begin = 0
        for tile, count in zip(query_tiles, _splits(counts, programs, max_splits), strict=True):
            splits[tile.first : tile.first + tile.queries] = count
            work.extend(tile.split(begin, int(count)))
            begin += tile.count
        table = np.array(work, np.int32)
        table = table[np.argsort(-table[:, 5], kind="stable")]
        return cls(table, np.concatenate([tile.key_tiles for tile in query_tiles]), splits)

    @property
    def max_splits(self) -> int:
        """The largest number of splits of a query."""
        return int(self.splits.max())


def query_tiles(
    keys: KeyTiles, qpos: Ints, first: int, base: int, tokens: int
) -> Iterator[QueryTile]:
    """Cuts the queries at positions `qpos` [n] into tiles of `tokens`.

    `first` is the number of the first query, `base` that of the request's first key tile.
    A padding query (GAP) sees nothing.
    """
    for start in range(0, len(qpos), tokens):
        own = qpos[start : start + tokens]
        seen = np.where(own == GAP, -1, own)
        yield _query_tile(keys, seen, first + start, base, tokens // 2)


def _query_tile(keys: KeyTiles, qpos: Ints, first: int, base: int, half: int) -> QueryTile:
    early, late = qpos[:half], qpos[half:]
    least = late.min(initial=GAP)
    whole = keys.highest <= qpos.min()
    second = ~whole & (keys.highest <= least) & (keys.lowest > early.max()) & (len(late) > 0)
    partial = ~whole & ~second & (keys.lowest <= qpos.max())
    kinds = [np.flatnonzero(kind) for kind in (partial, whole, second)]
    counts = [len(kind) for kind in kinds]
    key_tiles = (np.concatenate(kinds) + base).astype(np.int32)
    return QueryTile(first, len(qpos), key_tiles, counts[0], counts[0] + counts[1])


def _splits(counts: Ints, programs: int, max_splits: int) -> Ints:
    """Splits of each query tile of counts[i] key tiles that `programs` at once finish first."""
    if len(counts) >= 4 * programs:
        return np.ones(len(counts), int)
    longest = int(counts.max(initial=1))
    choices = [
        np.clip(-(-counts // max(1, -(-longest // splits))), 1, max_splits)
        for splits in _SPLITS
        if splits <= max_splits
    ]
    return min(choices, key=lambda splits: _makespan(counts, splits, programs))


def _makespan(counts: Ints, splits: Ints, programs: int) -> float:
    """When the last split ends if the longest start first (Graham, 1969), in key tiles."""
    times = np.repeat(counts / splits, splits) + START
    free = [0.0] * programs
    heapify(free)
    for time in -np.sort(-times):
        heapreplace(free, free[0] + float(time))
    return max(free)
