"""Link and prefill of planned requests: new tokens anywhere in the prompt see all before them.

Two ways, chosen by cost. Few queries read keys from the pages in which they are cached
(`PagedPrefill`). For more (`GatheredPrefill`), once a layer, the keys and values that they see are
copied into the workspace in logical order, keys rotated. Every run of queries at consecutive
positions is then an ordinary causal sequence over a prefix of that copy, and the runs of a request
share it. FlashAttention-3 serves long runs; where short ones prevail, or it is not there,
`TiledPrefill` serves them.

Few queries would mostly pay for the copy: 256 of them at the end of 32k keys take 1.24 of
FlashAttention-3's time over a plain request with it, and 1.07 in place (one H200).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from picbench.kernels.cuda.device import StagedUpload
from picbench.kernels.cuda.layout import cache_slots
from picbench.kernels.cuda.prefill import flash
from picbench.kernels.cuda.prefill.gather_rotated import PAGE, gather, gather_pages
from picbench.kernels.cuda.prefill.logical_order import LogicalOrder, runs
from picbench.kernels.cuda.prefill.paged import paged_prefill
from picbench.kernels.cuda.prefill.paged.key_tiles import KeyTiles
from picbench.kernels.cuda.prefill.paged.paged_prefill import PagedPrefill
from picbench.kernels.cuda.prefill.paged.tile_schedule import QueryTile, query_tiles
from picbench.kernels.cuda.prefill.query_tile import ROWS, tokens_of
from picbench.kernels.cuda.prefill.tiled import TiledPrefill, schedule_tiles, tile_work
from picbench.kernels.cuda.repeated_launch import RepeatedLaunch
from picbench.kernels.cuda.visible_blocks import Ints
from picbench.kernels.cuda.workspace import CudaWorkspace
from picbench.kernels.paging import BLOCK_BITS, BLOCK_SIZE
from picbench.kernels.rope import RopeTable
from picbench.kernels.shape import HeadShape

# Time per key and query tile relative to FlashAttention-3 over a copy, and the copy's per key (one
# H200).
_TILES_COST, _PAGED_COST, _COPY_COST = 1.3, 1.2, 2.7

# Query tiles beyond which keys are copied. For 2,048 queries in runs paged prefill took 0.85 of the
# copy's time over 32k keys and 1.10 over 16k (one H200); the host would schedule each tile.
_MAX_QUERY_TILES = 32


@dataclass(frozen=True, slots=True)
class LinkRequest:
    """One request of a step: row `index` of the block table, queries start .. stop of the batch.

    `order` covers all slots that exist when the step's tokens are stored; `qpos` [stop - start]
    int32 on the CPU are the queries' logical positions.
    """

    index: int
    start: int
    stop: int
    order: LogicalOrder
    qpos: Tensor


@dataclass(frozen=True, slots=True)
class GatheredPrefill:
    """Attention over keys and values that are copied into the workspace, keys rotated.

    `slots` [n] int64 and `rope_shift` [n] int32 say what is copied (`gather`) to `key` and `value`
    [pages, PAGE, kv_heads, size] in the workspace, as many KV heads as there are in one pass;
    `work` attends to these.
    """

    slots: Tensor
    rope_shift: Tensor
    work: flash.Runs | TiledPrefill
    rope: RopeTable
    shape: HeadShape
    key: Tensor
    value: Tensor
    launch: RepeatedLaunch

    def attend(self, query: Tensor, kv_cache: Tensor, scale: float, out: Tensor) -> None:
        """Attention of `query` [queries, num_heads, head_size] over the cache, into `out`."""
        together, all_heads = self.key.shape[2], self.shape.num_kv_heads
        if together == all_heads:
            self._attend_some(query, kv_cache, scale, out)
            return
        for first in range(0, all_heads, together):
            some = slice(first, first + together)
            heads = slice(first * self.shape.group, some.stop * self.shape.group)
            self._attend_some(query[:, heads], kv_cache[:, some], scale, out[:, heads])

    def _attend_some(self, query: Tensor, kv_cache: Tensor, scale: float, out: Tensor) -> None:
        copied = (self.slots, self.rope_shift, self.rope, self.key, self.value)
        gather(self.launch, kv_cache, *copied)
        self.work.attend(query, self.key, self.value, scale, out)


@dataclass(frozen=True, slots=True)
class LinkBatch:
    """The link requests of a step, prepared once for all layers of one shape.

    They own the queries first .. last of the packed batch; `prefill` attends.
    """

    first: int
    last: int
    prefill: GatheredPrefill | PagedPrefill

    @classmethod
    def build(
        cls,
        requests: Sequence[LinkRequest],
        block_table: Tensor,
        rope: RopeTable,
        shape: HeadShape,
        workspace: CudaWorkspace,
        *,
        copied: bool = False,
        most_tiles: int | None = None,
    ) -> "LinkBatch":
        """Prepares requests whose queries follow each other in the packed batch.

        `block_table` [requests, max_blocks] int32 is the step's, on the device. With `copied` keys
        are copied even where paged prefill costs less; for more than `most_tiles` query tiles they
        always are. Raises ConfigError if the keys of one KV head do not fit the workspace.
        """
        most = _MAX_QUERY_TILES if most_tiles is None else most_tiles
        step = _LinkStep.of(requests, block_table, rope, shape, workspace)
        prefill: GatheredPrefill | PagedPrefill | None = None
        if not copied and paged_prefill.covers(shape, rope) and step.few(most):
            prefill = _paged(step)
        prefill = prefill or _gathered(step)
        return cls(requests[0].start, requests[-1].stop, prefill)

    @property
    def served_by(self) -> str:
        """What attends: `paged`, `FA3` or `tiles`."""
        if isinstance(self.prefill, PagedPrefill):
            return "paged"
        return "FA3" if isinstance(self.prefill.work, flash.Runs) else "tiles"


def link(query: Tensor, kv_cache: Tensor, batch: LinkBatch, scale: float, out: Tensor) -> Tensor:
    """Attention of the batch's queries in `query` [tokens, num_heads, head_size] over the cache.

    Queries are rotated by their logical positions, and all keys of the step must have been stored.
    Fills the same rows of `out`, which has the shape of `query`; a query that sees nothing gets
    zeros. Slots that no query sees may hold anything, NaN included.
    """
    some = slice(batch.first, batch.last)
    batch.prefill.attend(query[some], kv_cache, scale, out[some])
    return out


@dataclass(frozen=True, slots=True)
class _LinkStep:
    """A step's requests, and the cost of attending to copies of their keys.

    `seen[i]` [queries] int32 is how many keys each query of request i sees, `pages[i]` how many
    pages a copy of them takes, `tiles` are rows of `tile_work` for such a copy. `by_tiles` and
    `by_runs` are costs of attention in key reads of FlashAttention-3; `by_runs` is infinite where
    that does not serve these heads.
    """

    requests: Sequence[LinkRequest]
    block_table: Tensor
    rope: RopeTable
    shape: HeadShape
    workspace: CudaWorkspace
    seen: list[Ints]
    pages: list[int]
    tiles: Ints
    by_tiles: float
    by_runs: float

    @classmethod
    def of(
        cls,
        requests: Sequence[LinkRequest],
        block_table: Tensor,
        rope: RopeTable,
        shape: HeadShape,
        workspace: CudaWorkspace,
    ) -> "_LinkStep":
        """Computes the costs."""
        seen = [request.order.seen(request.qpos.numpy()) for request in requests]
        pages = [-(-int(counts.max()) // PAGE) for counts in seen]
        tiles = _tiles(requests, seen, pages, tokens_of(shape.group))
        # The end of each tile's keys: what `TiledPrefill` reads.
        by_tiles = _TILES_COST * int(tiles[:, 5].sum())
        by_runs = _run_keys(seen, shape.group) if flash.covers(shape) else math.inf
        rest = (seen, pages, tiles, by_tiles, by_runs)
        return cls(requests, block_table, rope, shape, workspace, *rest)

    @property
    def copy_cost(self) -> float:
        """Cost of the copy and of attending to it."""
        return _COPY_COST * sum(self.pages) * PAGE + min(self.by_tiles, self.by_runs)

    def few(self, most: int) -> bool:
        """Whether paged prefill may cost less than the copy, with `most` tiles to schedule."""
        tokens = tokens_of(self.shape.group)
        count = sum(-(-len(counts) // tokens) for counts in self.seen)
        # Paged prefill reads at least the keys that `TiledPrefill` reads.
        least = _PAGED_COST * self.by_tiles / _TILES_COST
        return count <= most and least <= self.copy_cost


def _gathered(step: _LinkStep) -> GatheredPrefill:
    pages, shape, device = step.pages, step.shape, step.block_table.device
    tokens = sum(pages) * PAGE
    kv_heads = step.workspace.heads(tokens, shape.num_kv_heads, shape.head_size, shape.dtype)
    work: flash.Runs | TiledPrefill
    if step.by_runs < step.by_tiles:
        queries = _sequences(step.requests, step.seen, pages)
        *found, bounds, lengths, first_pages = _send(step, queries)
        every = torch.arange(max(pages), dtype=torch.int32, device=device)
        table = (first_pages.unsqueeze(1) + every).clamp(max=sum(pages) - 1)
        longest = int(np.diff(queries[0]).max()), int(queries[1].max())
        runs_of = flash.Runs(bounds, lengths, table, *longest)
        work = runs_of.scheduled(shape.with_kv_heads(kv_heads), PAGE)
    else:
        tiles = schedule_tiles(step.tiles, np.concatenate(step.seen), kv_heads)
        *found, rows, seen, counts = _send(step, tiles.arrays)
        work = TiledPrefill.of(rows, seen, counts, tiles.splits, shape, kv_heads)
    slots = cache_slots(step.block_table, *found[:3]).long()
    key, value = step.workspace.pages(sum(pages), PAGE, kv_heads, shape.head_size, shape.dtype)
    launch = RepeatedLaunch(gather_pages)
    return GatheredPrefill(slots, found[3], work, step.rope, shape, key, value, launch)


def _paged(step: _LinkStep) -> PagedPrefill | None:
    """Paged prefill, unless a copy costs less or keys are cached without RoPE."""
    keys = []
    for request in step.requests:
        tiles = KeyTiles.of(request.order.slots)
        if tiles is None:
            return None
        keys.append(tiles)
    found = list(_query_tiles(step.requests, keys, tokens_of(step.shape.group)))
    if _PAGED_COST * paged_prefill.keys_read(found) > step.copy_cost:
        return None
    qpos = np.concatenate([request.qpos.numpy() for request in step.requests])
    rows = [request.index for request in step.requests]
    where = (step.block_table, rows, qpos)
    return PagedPrefill.of(found, keys, *where, step.rope, step.shape, step.workspace)


def _query_tiles(
    requests: Sequence[LinkRequest], keys: Sequence[KeyTiles], tokens: int
) -> Iterator[QueryTile]:
    base = 0
    for request, own in zip(requests, keys, strict=True):
        first = request.start - requests[0].start
        yield from query_tiles(own, request.qpos.numpy(), first, base, tokens)
        base += len(own.rope_shift)


def _send(step: _LinkStep, others: Sequence[Ints]) -> list[Tensor]:
    """What `_copied` lists, then `others`, on the device."""
    count = sum(step.pages) * PAGE
    shapes = [*[(count,)] * 4, *(array.shape for array in others)]
    staging = StagedUpload(shapes, step.block_table.device)
    _copied(step, *staging.arrays[:4])
    for place, array in zip(staging.arrays[4:], others, strict=True):
        place[...] = array
    return staging.send()


def _copied(step: _LinkStep, at: Ints, offset: Ints, size: Ints, shift: Ints) -> None:
    """Writes what is copied, key by key, into four arrays [pages * PAGE].

    They are what `cache_slots` asks for, and the RoPE shift.
    """
    width, begin = step.block_table.shape[1], 0
    for request, pages in zip(step.requests, step.pages, strict=True):
        slots, shifts = request.order.keys(pages * PAGE)
        own, end = slice(begin, begin + len(slots)), begin + pages * PAGE
        np.right_shift(slots, BLOCK_BITS, out=at[own])
        at[own] += request.index * width
        np.bitwise_and(slots, BLOCK_SIZE - 1, out=offset[own])
        size[own], shift[own] = BLOCK_SIZE, shifts
        rest = slice(own.stop, end)
        at[rest], offset[rest], size[rest], shift[rest] = 0, -1, 0, 0
        begin = end


def _sequences(
    requests: Sequence[LinkRequest], seen: Sequence[Ints], pages: Sequence[int]
) -> tuple[Ints, Ints, Ints]:
    """`starts` and `lengths` of `flash.Runs`, and the first page of each sequence."""
    starts, lengths, bases = [np.zeros(1, np.int32)], [], []
    base = 0
    for request, counts, count in zip(requests, seen, pages, strict=True):
        cuts, ends = runs(counts)
        starts.append(cuts[1:] + request.start - requests[0].start)
        lengths.append(ends)
        bases.append(np.full(len(ends), base, np.int32))
        base += count
    bounds = np.concatenate(starts).astype(np.int32)
    return bounds, np.concatenate(lengths), np.concatenate(bases)


def _tiles(
    requests: Sequence[LinkRequest], seen: Sequence[Ints], pages: Sequence[int], tokens: int
) -> Ints:
    """Rows of `tile_work` of all requests."""
    work, base = [], 0
    for request, counts, count in zip(requests, seen, pages, strict=True):
        first = request.start - requests[0].start
        work.append(tile_work(counts, first, base * PAGE, tokens))
        base += count
    return np.concatenate(work)


def _run_keys(seen: Sequence[Ints], group: int) -> float:
    """Keys that FlashAttention-3's tiles read, which runs may leave unfilled."""
    cuts = [runs(counts) for counts in seen]
    return sum(_flash_keys(np.diff(starts), lengths, group) for starts, lengths in cuts)


def _flash_keys(queries: Ints, lengths: Ints, group: int) -> int:
    """Keys that FlashAttention's tiles read: each tile of a run up to its own last query."""
    tokens = max(1, ROWS // group)
    tiles = -(-queries // tokens)
    keys = tiles * (lengths - queries) + tokens * tiles * (tiles - 1) // 2 + queries
    return int(keys.sum(dtype=np.int64))
