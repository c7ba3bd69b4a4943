"""Causal attention of scattered queries over keys in logical order (Triton).

A query tile is some consecutive queries of a request, each of which sees a prefix of the request's
keys of its own length. Keys that all of them see need no mask; the others are masked row by row. So
short runs of queries share a tile, where FlashAttention would give each run a tile of its own.
Where query tiles are too few to fill the device, their keys are split and `merge` joins the outputs
(Flash-Decoding, Dao et al., 2023).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from picbench.kernels.cuda.base_two import LN2, LOG2E
from picbench.kernels.cuda.device import precision
from picbench.kernels.cuda.merge import merge, merge_splits
from picbench.kernels.cuda.prefill.query_tile import tokens_of
from picbench.kernels.cuda.repeated_launch import RepeatedLaunch
from picbench.kernels.cuda.visible_blocks import Ints
from picbench.kernels.shape import HeadShape

# Keys are read this many at a time, and splits begin at multiples of it.
_STEP = 128
# Programs below which keys are split: two for each multiprocessor of an H200, which holds one at a
# time.
_PROGRAMS = 264


@dataclass(frozen=True, slots=True)
class TiledPrefill:
    """A step's query tiles on the device.

    `work` [n, 7] int32 has a row a program: first query, number of queries, index of the request's
    first key, then, counted from that key, the first key of the split, the end of its keys that all
    queries see and the end of those that any sees, and the number of the split. Query i sees the
    first seen[i] keys of its request; `seen` [queries] is int32. With `splits` > 1, `split_counts`
    [queries] int32 is the number of splits of each query's tile, and `partial` [queries * splits,
    heads, head_size] and `lse` [queries * splits, heads], float32, hold their outputs. The launches
    are those of all layers.
    """

    work: Tensor
    seen: Tensor
    splits: int
    split_counts: Tensor
    partial: Tensor
    lse: Tensor
    launch: RepeatedLaunch
    launch_merge: RepeatedLaunch

    @classmethod
    def of(
        cls,
        work: Tensor,
        seen: Tensor,
        split_counts: Tensor,
        splits: int,
        shape: HeadShape,
        kv_heads: int,
    ) -> "TiledPrefill":
        """The arrays of a `TileSplits` on the device, served `kv_heads` KV heads at a time."""
        size = len(seen) * splits if splits > 1 else 0, kv_heads * shape.group
        floats: dict[str, Any] = {"dtype": torch.float32, "device": work.device}
        partial, lse = torch.empty(*size, shape.head_size, **floats), torch.empty(size, **floats)
        launches = RepeatedLaunch(_attend), RepeatedLaunch(merge)
        return cls(work, seen, splits, split_counts, partial, lse, *launches)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, out: Tensor) -> None:
        """Attention of `query` [queries, heads, size] over [..., keys, kv_heads, size].

        Fills `out`, which has the shape of `query`.
        """
        _, heads, size = query.shape
        kv_heads = key.shape[-2]
        group = heads // kv_heads
        keys, stages = _keys_and_stages(size * key.itemsize)
        step = (self.partial, self.lse, self.work, self.seen, scale * LOG2E)
        strides = (*query.stride()[:2], *out.stride()[:2])
        self.launch(
            (kv_heads, len(self.work), 1),
            (query, key, value, out, *step, *strides, kv_heads, self.splits),
            {
                "SIZE": size,
                "GROUP": group,
                "PADDED": triton.next_power_of_2(group),
                "TOKENS": tokens_of(group),
                "KEYS": keys,
                "SPLIT": self.splits > 1,
                "PRECISION": precision(query.dtype),
                "num_warps": 8,
                "num_stages": stages,
            },
        )
        if self.splits > 1:
            merge_splits(
                self.launch_merge, self.partial, self.lse, self.split_counts, out, self.splits
            )


@dataclass(frozen=True, slots=True)
class TileSplits:
    """A step's query tiles before they are on the device: `TiledPrefill` says what they are."""

    work: Ints
    seen: Ints
    split_counts: Ints
    splits: int

    @property
    def arrays(self) -> tuple[Ints, Ints, Ints]:
        """What the device gets."""
        return self.work, self.seen, self.split_counts


def schedule_tiles(tiles: Ints, seen: Ints, kv_heads: int) -> TileSplits:
    """Splits the rows of `tile_work`, whose queries see seen[i] keys."""
    work, splits = split_work(tiles, kv_heads)
    # The longest first: the last programs to start are then the shortest.
    order = np.argsort(work[:, 3] - work[:, 5], kind="stable")
    counts = np.zeros(len(seen), np.int32)
    # The last split of each tile is followed by the first of another.
    last = np.append(work[1:, 6] == 0, True)
    for first, queries, split in work[last][:, [0, 1, 6]].tolist():
        counts[first : first + queries] = split + 1
    return TileSplits(work[order], seen, counts, splits)


def tile_work(seen: Ints, first: int, first_key: int, tokens: int) -> Ints:
    """Rows of `TiledPrefill.work`, not split, for queries from `first` on that see seen[i] keys.

    `first_key` is the index of the request's first key, `tokens` the size of a tile in queries.
    """
    starts = np.arange(0, len(seen), tokens)
    least = np.minimum.reduceat(seen, starts)
    most = np.maximum.reduceat(seen, starts)
    counts = np.minimum(len(seen) - starts, tokens)
    zeros = np.zeros_like(starts)
    rows = [starts + first, counts, zeros + first_key, zeros, least // _STEP * _STEP, most, zeros]
    return np.stack(rows, axis=1).astype(np.int32)


def split_work(tiles: Ints, kv_heads: int) -> tuple[Ints, int]:
    """Splits the keys of query tiles about evenly where tiles are few; the most splits of a tile.

    A tile whose queries see nothing keeps one split, so that its output is written.
    """
    if len(tiles) * kv_heads >= _PROGRAMS:
        return tiles, 1
    total = int(tiles[:, 5].sum()) * kv_heads
    length = max(1024, -(-total // _PROGRAMS // _STEP) * _STEP)
    splits = np.maximum(-(-tiles[:, 5] // length), 1)
    work = np.repeat(tiles, splits, axis=0)
    split = np.concatenate([np.arange(count) for count in splits])
    work[:, 3] = split * length
    work[:, 5] = np.minimum(work[:, 5], work[:, 3] + length)
    work[:, 4] = np.clip(work[:, 4], work[:, 3], work[:, 5] // _STEP * _STEP)
    work[:, 6] = split
    return work, int(splits.max())


def _keys_and_stages(row_bytes: int) -> tuple[int, int]:
    # What fits the shared memory of a multiprocessor (227 KiB) beside the queries.
    if row_bytes <= 256:
        return 128, 3
    return (64, 2) if row_bytes <= 512 else (16, 2)


@triton.jit(do_not_specialize=["kv_heads", "splits"])
def _attend(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    lse: tl.tensor,
    work: tl.tensor,
    seen: tl.tensor,
    scale: tl.tensor,
    query_stride: tl.tensor,
    query_head: tl.tensor,
    out_stride: tl.tensor,
    out_head: tl.tensor,
    kv_heads: tl.tensor,
    splits: tl.tensor,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Attention of one row of `TiledPrefill.work`; grid (KV heads, n). `scale` includes log2(e).

    GROUP query heads share a KV head, padded to PADDED rows a query; a tile has TOKENS queries.
    With SPLIT, outputs and log-sum-exps go to `partial` and `lse`, else outputs go to `out`.
    """
    kv_head = tl.program_id(0)
    work += tl.program_id(1) * 7
    first = tl.load(work)
    count = tl.load(work + 1)
    first_key = tl.load(work + 2).to(tl.int64)
    begin = tl.load(work + 3)
    whole = tl.load(work + 4)
    end = tl.load(work + 5)
    row = tl.arange(0, TOKENS * PADDED)
    dim = tl.arange(0, SIZE)[None, :]
    lane = tl.arange(0, KEYS)
    token = (first + row // PADDED).to(tl.int64)
    head = kv_head * GROUP + row % PADDED
    wanted = (row // PADDED < count) & (row % PADDED < GROUP)
    at = token * query_stride + head * query_head
    q = tl.load(query + at[:, None] + dim, mask=wanted[:, None], other=0.0)
    sees = tl.load(seen + token, mask=wanted, other=0)
    step = first_key * 0 + kv_heads * SIZE  # int64
    base = ((first_key + lane) * step + kv_head * SIZE)[:, None] + dim
    row_max = tl.full([TOKENS * PADDED], float("-inf"), tl.float32)
    row_sum = tl.zeros([TOKENS * PADDED], tl.float32)
    acc = tl.zeros([TOKENS * PADDED, SIZE], tl.float32)
    for start in range(begin, whole, KEYS):
        k = tl.load(key + base + start * step)
        v = tl.load(value + base + start * step)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        peak = tl.maximum(row_max, tl.max(scores, 1) * scale)
        weight = tl.exp2(scores * scale - peak[:, None])
        rescale = tl.exp2(row_max - peak)
        row_sum = row_sum * rescale + tl.sum(weight, 1)
        acc = tl.dot(weight.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        row_max = peak
    for start in range(whole, end, KEYS):
        there = (start + lane < end)[:, None]
        k = tl.load(key + base + start * step, mask=there, other=0.0)
        v = tl.load(value + base + start * step, mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        shown = ((start + lane)[None, :] < sees[:, None]) & (start + lane < end)[None, :]
        scores = tl.where(shown, scores, float("-inf"))
        peak = tl.maximum(row_max, tl.max(scores, 1))
        safe = tl.where(peak == float("-inf"), 0.0, peak)
        weight = tl.exp2(scores - safe[:, None])
        rescale = tl.exp2(row_max - safe)
        row_sum = row_sum * rescale + tl.sum(weight, 1)
        acc = tl.dot(weight.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        row_max = peak
    result = acc / tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]
    if SPLIT:
        index = (token * splits + tl.load(work + 6)) * (kv_heads * GROUP) + head
        some = row_sum > 0.0
        logs = tl.where(some, row_max + tl.log2(tl.where(some, row_sum, 1.0)), float("-inf"))
        tl.store(lse + index, logs * LN2, mask=wanted)
        tl.store(partial + index[:, None] * SIZE + dim, result, mask=wanted[:, None])
    else:
        to = out + (token * out_stride + head * out_head)[:, None] + dim
        tl.store(to, result.to(out.dtype.element_ty), mask=wanted[:, None])
