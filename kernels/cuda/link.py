"""Link and prefill of planned requests: new tokens anywhere in the prompt see all before them.

Once a layer the keys and values that the queries see are copied into the workspace in logical
order, keys rotated (`gather`). Every run of queries at consecutive positions is then an ordinary
causal sequence over a prefix of that copy, and the runs of a request share it. FlashAttention-3
serves long runs; where short ones prevail, or it is not there, `tiles` serves them.

The copy is what few queries pay for: 256 of them over 32k keys take 1.25 of FlashAttention-3's time
over a plain request, 0.94 without the copy (one H200). Gathering the next layer's keys on a stream
of its own, while this layer attends, took 1.16 to 1.26 with the best settings for each of four
cases (256 runs or a tail, over 32k and 128k keys), where this form takes 1.23 to 1.26: few programs
copy too slowly (8 of them 30 GB/s each), many keep attention waiting.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from picbench.kernels.cuda import flash
from picbench.kernels.cuda.gather import PAGE, gather
from picbench.kernels.cuda.order import Ints, LogicalOrder, runs
from picbench.kernels.cuda.tiles import ROWS, Tiles, tile_rows, tokens_of, upload
from picbench.kernels.cuda.workspace import CudaWorkspace
from picbench.kernels.paging import BLOCK_SIZE
from picbench.kernels.rope import RopeTable
from picbench.kernels.shape import HeadShape

# How much faster FlashAttention-3 works off a full tile than `tiles` does (one H200).
_FLASH_RATE = 1.3


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
class LinkBatch:
    """The link requests of a step, worked out once for all layers of one shape.

    `slots` [n] int64 and `turns` [n] int32 fill the workspace's pages (`gather`). The queries
    first .. last of the packed batch are cut into `work`. `kv_heads` are served in one pass.
    """

    slots: Tensor
    turns: Tensor
    first: int
    last: int
    work: flash.Runs | Tiles
    rope: RopeTable
    shape: HeadShape
    workspace: CudaWorkspace
    kv_heads: int

    @classmethod
    def build(
        cls,
        requests: Sequence[LinkRequest],
        block_table: Tensor,
        rope: RopeTable,
        shape: HeadShape,
        workspace: CudaWorkspace,
    ) -> "LinkBatch":
        """Prepares requests whose queries follow each other in the packed batch.

        `block_table` [requests, max_blocks] int32 is the step's, on the device. Raises ConfigError
        if the keys of one KV head do not fit the workspace.
        """
        device = block_table.device
        seen = [request.order.seen(request.qpos.numpy()) for request in requests]
        pages = [-(-int(counts.max()) // PAGE) for counts in seen]
        slots, turns = _places(requests, pages, block_table)
        tokens = sum(pages) * PAGE
        kv_heads = workspace.heads(tokens, shape.num_kv_heads, shape.head_size, shape.dtype)
        work: flash.Runs | Tiles
        if flash.covers(shape) and _flash_is_faster(seen, shape.group):
            work = _sequences(requests, seen, pages, device).scheduled(shape.part(kv_heads), PAGE)
        else:
            work = _tiles(requests, seen, pages, shape, kv_heads, device)
        return cls(
            slots,
            turns,
            requests[0].start,
            requests[-1].stop,
            work,
            rope,
            shape,
            workspace,
            kv_heads,
        )


def link(query: Tensor, kv_cache: Tensor, batch: LinkBatch, scale: float, out: Tensor) -> Tensor:
    """Attention of the batch's part of `query` [tokens, num_heads, head_size] over the cache.

    Queries are rotated by their logical positions, and all keys of the step must have been stored.
    Fills the same part of `out`, which has the shape of `query`; a query that sees nothing gets
    zeros. Slots that no query sees may hold anything, NaN included.
    """
    shape = batch.shape
    pages = len(batch.slots) // PAGE
    for first in range(0, shape.num_kv_heads, batch.kv_heads):
        some = slice(first, first + batch.kv_heads)
        heads = slice(first * shape.group, (first + batch.kv_heads) * shape.group)
        key, value = batch.workspace.pages(
            pages, PAGE, batch.kv_heads, shape.head_size, shape.dtype
        )
        gather(kv_cache[:, some], batch.slots, batch.turns, batch.rope, key, value)
        batch.work.attend(
            query[batch.first : batch.last, heads],
            key,
            value,
            scale,
            out[batch.first : batch.last, heads],
        )
    return out


def _places(
    requests: Sequence[LinkRequest], pages: Sequence[int], block_table: Tensor
) -> tuple[Tensor, Tensor]:
    total = sum(pages) * PAGE
    host = np.zeros((3, total), np.int32)
    host[0] = -1
    at = 0
    for request, count in zip(requests, pages, strict=True):
        used = min(count * PAGE, len(request.order.slots))
        host[0, at : at + used] = request.order.slots[:used]
        host[1, at : at + used] = request.order.turns[:used]
        host[2, at : at + count * PAGE] = request.index
        at += count * PAGE
    order, turns, index = upload(host, block_table.device)
    blocks = block_table[index.long(), order.clamp(min=0).long() // BLOCK_SIZE].long()
    slots = blocks * BLOCK_SIZE + order % BLOCK_SIZE
    return torch.where(order < 0, -1, slots), turns.contiguous()


def _sequences(
    requests: Sequence[LinkRequest],
    seen: Sequence[Ints],
    pages: Sequence[int],
    device: torch.device,
) -> flash.Runs:
    starts, lengths, bases = [np.zeros(1, np.int32)], [], []
    base = 0
    for request, counts, count in zip(requests, seen, pages, strict=True):
        cuts, ends = runs(counts)
        starts.append(cuts[1:] + request.start - requests[0].start)
        lengths.append(ends)
        bases.append(np.full(len(ends), base, np.int32))
        base += count
    bounds = np.concatenate(starts).astype(np.int32)
    lengths_all, base_all = np.concatenate(lengths), np.concatenate(bases)
    packed = np.concatenate([bounds, lengths_all, base_all])
    on_device = upload(packed, device)
    n = len(lengths_all)
    first_page = on_device[2 * n + 1 :].unsqueeze(1)
    table = first_page + torch.arange(max(pages), dtype=torch.int32, device=device)
    return flash.Runs(
        starts=on_device[: n + 1],
        lengths=on_device[n + 1 : 2 * n + 1],
        table=table.clamp(max=sum(pages) - 1),
        longest_query=int(np.diff(bounds).max()),
        longest_key=int(lengths_all.max()),
    )


def _tiles(
    requests: Sequence[LinkRequest],
    seen: Sequence[Ints],
    pages: Sequence[int],
    shape: HeadShape,
    kv_heads: int,
    device: torch.device,
) -> Tiles:
    rows, base = [], 0
    for request, counts, count in zip(requests, seen, pages, strict=True):
        first = request.start - requests[0].start
        rows.append(tile_rows(counts, first, base * PAGE, tokens_of(shape.group)))
        base += count
    return Tiles.of(np.concatenate(rows), np.concatenate(seen), shape, kv_heads, device)


def _flash_is_faster(seen: Sequence[Ints], group: int) -> bool:
    """Whether FlashAttention's rate makes up for the tiles that its runs do not fill."""
    by_runs = by_tiles = 0
    for counts in seen:
        starts, lengths = runs(counts)
        by_runs += _flash_keys(np.diff(starts), lengths, group)
        by_tiles += int(tile_rows(counts, 0, 0, tokens_of(group))[:, 5].sum())
    return by_runs < _FLASH_RATE * by_tiles


def _flash_keys(queries: Ints, lengths: Ints, group: int) -> int:
    """Keys that FlashAttention's tiles read: each tile of a run up to its own last query."""
    tokens = max(1, ROWS // group)
    tiles = -(-queries // tokens)
    keys = tiles * (lengths - queries) + tokens * tiles * (tiles - 1) // 2 + queries
    return int(keys.sum(dtype=np.int64))
