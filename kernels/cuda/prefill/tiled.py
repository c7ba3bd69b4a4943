"""Causal attention of scattered queries over keys in logical order (Triton).

A tile is some consecutive queries of a request, each of which sees a prefix of the request's keys
of its own length. Keys that all of them see need no mask; the rest is masked row by row. So runs
of few queries share a tile, where FlashAttention would give each run a tile of its own. Where
tiles are too few to fill the device, each is cut into pieces of its keys, which `merge` joins.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from picbench.kernels.cuda.merge import merge_parts
from picbench.kernels.cuda.prefill.logical_order import Ints
from picbench.kernels.shape import HeadShape

#: Query rows (tokens times packed heads) of a tile.
ROWS = 128

# Keys are read so many at a time, and pieces begin at multiples of it.
_STEP = 128
# Programs below which tiles are cut into pieces: two for each multiprocessor of an H200, which
# holds one at a time.
_PROGRAMS = 264


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of queries, on the device: `table` [n, 7] int32, `seen` [tokens] int32.

    A row of `table` is the first query, the count of queries, the place of the request's first
    key, the first key of this piece, the end of its keys that all queries see, the end of those
    that any sees, and the number of the piece. Query i sees seen[i] keys. If tiles are cut,
    `counts` [tokens] int32 is the number of pieces of each query's tile and `partial` [tokens *
    pieces, heads, size] and `lse` [tokens * pieces, heads] hold their outputs, in float32.
    """

    table: Tensor
    seen: Tensor
    pieces: int
    counts: Tensor
    partial: Tensor
    lse: Tensor

    @classmethod
    def of(
        cls, tiles: Ints, seen: Ints, shape: HeadShape, kv_heads: int, device: torch.device
    ) -> "Tiles":
        """Tiles from the rows of `tile_rows`, served `kv_heads` KV heads at a time."""
        table, pieces = cut(tiles, kv_heads)
        # The longest first: the last programs to start are then the shortest.
        order = np.argsort(table[:, 3] - table[:, 5], kind="stable")
        counts = np.zeros(len(seen), np.int32)
        for row in table:
            counts[row[0] : row[0] + row[1]] = np.maximum(
                counts[row[0] : row[0] + row[1]], row[6] + 1
            )
        parts = len(seen) * pieces if pieces > 1 else 0
        heads = kv_heads * shape.group
        return cls(
            upload(table[order], device),
            upload(seen, device),
            pieces,
            upload(counts, device),
            torch.empty(parts, heads, shape.head_size, dtype=torch.float32, device=device),
            torch.empty(parts, heads, dtype=torch.float32, device=device),
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, out: Tensor) -> None:
        """Attention of `query` [tokens, heads, size] over [..., places, kv_heads, size].

        Fills `out`, which has the shape of `query`.
        """
        _, heads, size = query.shape
        kv_heads = key.shape[-2]
        group = heads // kv_heads
        keys, stages = _keys_and_stages(size * key.itemsize)
        _attend[(kv_heads, len(self.table))](
            query,
            key,
            value,
            out,
            self.partial,
            self.lse,
            self.table,
            self.seen,
            scale * math.log2(math.e),
            query.stride(0),
            query.stride(1),
            out.stride(0),
            out.stride(1),
            kv_heads,
            self.pieces,
            SIZE=size,
            GROUP=group,
            PADDED=triton.next_power_of_2(group),
            TOKENS=tokens_of(group),
            KEYS=keys,
            CUT=self.pieces > 1,
            PRECISION=precision(query.dtype),
            num_warps=8,
            num_stages=stages,
        )
        if self.pieces > 1:
            merge_parts(self.partial, self.lse, self.counts, out, self.pieces)


def tokens_of(group: int) -> int:
    """Queries of a tile where `group` query heads share a KV head."""
    return max(1, ROWS // int(triton.next_power_of_2(group)))


def tile_rows(seen: Ints, first: int, place: int, tokens: int) -> Ints:
    """Uncut rows of `Tiles.table` for a request's queries, from `first` on, that see seen[i] keys.

    `place` is where the request's keys begin, `tokens` what a tile holds.
    """
    starts = np.arange(0, len(seen), tokens)
    least = np.minimum.reduceat(seen, starts)
    most = np.maximum.reduceat(seen, starts)
    counts = np.minimum(len(seen) - starts, tokens)
    nothing = np.zeros_like(starts)
    rows = [starts + first, counts, nothing + place, nothing, least // _STEP * _STEP, most, nothing]
    return np.stack(rows, axis=1).astype(np.int32)


def cut(rows: Ints, kv_heads: int) -> tuple[Ints, int]:
    """Cuts tiles into pieces of about equal length where they are few; the most pieces of a tile.

    A tile whose queries see nothing keeps one piece, so that its output is written.
    """
    if len(rows) * kv_heads >= _PROGRAMS:
        return rows, 1
    total = int(rows[:, 5].sum()) * kv_heads
    length = max(1024, -(-total // _PROGRAMS // _STEP) * _STEP)
    pieces = np.maximum(-(-rows[:, 5] // length), 1)
    table = np.repeat(rows, pieces, axis=0)
    piece = np.concatenate([np.arange(count) for count in pieces])
    table[:, 3] = piece * length
    table[:, 5] = np.minimum(table[:, 5], table[:, 3] + length)
    table[:, 4] = np.clip(table[:, 4], table[:, 3], table[:, 5] // _STEP * _STEP)
    table[:, 6] = piece
    return table, int(pieces.max())


def precision(dtype: torch.dtype) -> str:
    """How the matrix units multiply this type: float32 exactly, not as TF32."""
    return "ieee" if dtype == torch.float32 else "tf32"


def upload(values: np.ndarray, device: torch.device) -> Tensor:
    """The values on the device, by an asynchronous copy."""
    host = torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def _keys_and_stages(row_bytes: int) -> tuple[int, int]:
    # What fits the shared memory of a multiprocessor (227 KiB) beside the queries.
    if row_bytes <= 256:
        return 128, 3
    return (64, 2) if row_bytes <= 512 else (16, 2)


@triton.jit(do_not_specialize=["pieces"])
def _attend(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    lse: tl.tensor,
    table: tl.tensor,
    seen: tl.tensor,
    scale: tl.tensor,
    query_stride: tl.tensor,
    query_head: tl.tensor,
    out_stride: tl.tensor,
    out_head: tl.tensor,
    kv_heads: tl.tensor,
    pieces: tl.tensor,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    CUT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    kv_head = tl.program_id(0)
    table += tl.program_id(1) * 7
    first = tl.load(table)
    count = tl.load(table + 1)
    place = tl.load(table + 2).to(tl.int64)
    begin = tl.load(table + 3)
    whole = tl.load(table + 4)
    end = tl.load(table + 5)
    row = tl.arange(0, TOKENS * PADDED)
    dim = tl.arange(0, SIZE)[None, :]
    lane = tl.arange(0, KEYS)
    token = (first + row // PADDED).to(tl.int64)
    head = kv_head * GROUP + row % PADDED
    wanted = (row // PADDED < count) & (row % PADDED < GROUP)
    at = token * query_stride + head * query_head
    q = tl.load(query + at[:, None] + dim, mask=wanted[:, None], other=0.0)
    sees = tl.load(seen + token, mask=wanted, other=0)
    step = place * 0 + kv_heads * SIZE  # int64
    from_ = ((place + lane) * step + kv_head * SIZE)[:, None] + dim
    highest = tl.full([TOKENS * PADDED], float("-inf"), tl.float32)
    total = tl.zeros([TOKENS * PADDED], tl.float32)
    joint = tl.zeros([TOKENS * PADDED, SIZE], tl.float32)
    for start in range(begin, whole, KEYS):
        k = tl.load(key + from_ + start * step)
        v = tl.load(value + from_ + start * step)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        peak = tl.maximum(highest, tl.max(scores, 1) * scale)
        weight = tl.exp2(scores * scale - peak[:, None])
        fade = tl.exp2(highest - peak)
        total = total * fade + tl.sum(weight, 1)
        joint = tl.dot(weight.to(v.dtype), v, joint * fade[:, None], input_precision=PRECISION)
        highest = peak
    for start in range(whole, end, KEYS):
        there = (start + lane < end)[:, None]
        k = tl.load(key + from_ + start * step, mask=there, other=0.0)
        v = tl.load(value + from_ + start * step, mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        shown = ((start + lane)[None, :] < sees[:, None]) & (start + lane < end)[None, :]
        scores = tl.where(shown, scores, float("-inf"))
        peak = tl.maximum(highest, tl.max(scores, 1))
        safe = tl.where(peak == float("-inf"), 0.0, peak)
        weight = tl.exp2(scores - safe[:, None])
        fade = tl.exp2(highest - safe)
        total = total * fade + tl.sum(weight, 1)
        joint = tl.dot(weight.to(v.dtype), v, joint * fade[:, None], input_precision=PRECISION)
        highest = peak
    result = joint / tl.where(total > 0.0, total, 1.0)[:, None]
    if CUT:
        part = (token * pieces + tl.load(table + 6)) * (kv_heads * GROUP) + head
        some = total > 0.0
        logs = tl.where(some, highest + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
        tl.store(lse + part, logs * 0.6931471805599453, mask=wanted)
        tl.store(partial + part[:, None] * SIZE + dim, result, mask=wanted[:, None])
    else:
        to = out + (token * out_stride + head * out_head)[:, None] + dim
        tl.store(to, result.to(out.dtype.element_ty), mask=wanted[:, None])
