"""Which key tiles each query tile of a step reads, split so that the GPU is full. Host side."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapreplace

import numpy as np
from numpy.typing import NDArray

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
        chosen = _splits(counts, programs, max_splits)
        splits = np.zeros(queries, np.int32)
        for tile, count in zip(query_tiles, chosen.tolist(), strict=True):
            splits[tile.first : tile.first + tile.queries] = count
        work = _work(query_tiles, counts, chosen)
        return cls(work, np.concatenate([tile.key_tiles for tile in query_tiles]), splits)

    @property
    def max_splits(self) -> int:
        """The largest number of splits of a query."""
        return int(self.splits.max())


def _work(query_tiles: Sequence[QueryTile], counts: Ints, splits: Ints) -> Ints:
    """`TileSchedule.work`: tile i has counts[i] key tiles and splits[i] programs."""
    tiles = np.array([(t.first, t.queries, t.masked, t.common) for t in query_tiles])
    begins = np.cumsum(counts) - counts
    rows = np.repeat(np.column_stack([tiles, begins, counts, splits]), splits, axis=0)
    first, queries, masked, common, begin, all_tiles, parts = rows.T
    split = np.arange(len(rows)) - np.repeat(np.cumsum(splits) - splits, splits)
    start = all_tiles * split // parts
    count = all_tiles * (split + 1) // parts - start
    own = [np.minimum(np.maximum(part - start, 0), count) for part in (masked, common)]
    work = np.column_stack([first, queries, begin + start, *own, count, split])
    return work[np.argsort(-count, kind="stable")].astype(np.int32)


def query_tiles(
    keys: KeyTiles, qpos: Ints, first: int, base: int, tokens: int
) -> Iterator[QueryTile]:
    """Cuts the queries at positions `qpos` [n] into tiles of `tokens`.

    `first` is the number of the first query, `base` that of the request's first key tile.
    A padding query (GAP) sees nothing.
    """
    if not len(qpos):
        return
    counts = np.minimum(len(qpos) - np.arange(0, len(qpos), tokens), tokens)
    kinds = _kinds(keys, _by_tile(qpos, tokens), counts, tokens // 2)
    numbers = np.argsort(kinds, axis=1, kind="stable").astype(np.int32) + np.int32(base)
    masked, whole, second = (np.count_nonzero(kinds == kind, axis=1) for kind in range(3))
    read = (masked + whole + second).tolist()
    bounds = zip(counts.tolist(), masked.tolist(), (masked + whole).tolist(), read, strict=True)
    for i, (queries, some, common, count) in enumerate(bounds):
        yield QueryTile(first + i * tokens, queries, numbers[i, :count], some, common)


def _by_tile(qpos: Ints, tokens: int) -> Ints:
    """Positions of tiles of queries [tiles, tokens], -1 for padding; GAP after the last query."""
    padded = np.full(-(-len(qpos) // tokens) * tokens, GAP, np.int32)
    padded[: len(qpos)] = np.where(qpos == GAP, -1, qpos)
    return padded.reshape(-1, tokens)


def _kinds(keys: KeyTiles, qpos: Ints, counts: Ints, half: int) -> NDArray[np.int8]:
    """How each tile of queries reads each key tile [tiles, key tiles].

    0: in part; 1: as a whole; 2: as a whole by its second half, and not by the first; 3: not at
    all.
    """
    highest, lowest = keys.highest[None, :], keys.lowest[None, :]
    there = np.where(qpos < GAP, qpos, -1)
    least, late = qpos.min(1)[:, None], qpos[:, half:].min(1, initial=GAP)[:, None]
    most, early = there.max(1)[:, None], there[:, :half].max(1)[:, None]
    whole = highest <= least
    second = (highest <= late) & (lowest > early) & (counts > half)[:, None]
    kinds = np.where(lowest <= most, np.int8(0), np.int8(3))
    kinds[second] = 2
    kinds[whole] = 1
    return kinds


def _splits(counts: Ints, programs: int, max_splits: int) -> Ints:
    """Splits of each query tile of counts[i] key tiles that `programs` at once finish first."""
    if len(counts) >= 4 * programs:
        return np.ones(len(counts), int)
    longest = int(counts.max(initial=1))
    chosen, shortest = np.ones(len(counts), int), math.inf
    for parts in _SPLITS:
        if parts > max_splits:
            break
        splits = np.clip(-(-counts // max(1, -(-longest // parts))), 1, max_splits)
        time = _makespan(counts, splits, programs, shortest)
        if time < shortest:
            chosen, shortest = splits, time
    return chosen


def _makespan(counts: Ints, splits: Ints, programs: int, most: float = math.inf) -> float:
    """When the last split ends if the longest start first (Graham, 1969), in key tiles.

    Infinity where that is `most` or later for certain.
    """
    each = counts / splits + START
    if max(float(each.max()), float((each * splits).sum()) / programs) * (1 - 1e-9) >= most:
        return math.inf
    if int(splits.sum()) <= programs:
        return float(each.max())
    free = [0.0] * programs
    for time in (-np.sort(-np.repeat(each, splits))).tolist():
        heapreplace(free, free[0] + time)
    return max(free)
