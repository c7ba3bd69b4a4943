"""Decode of planned requests: one query each, over keys that are cached at any position."""

import math
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from picbench.kernels.cuda.base_two import LOG2E
from picbench.kernels.cuda.decode import split_kv
from picbench.kernels.cuda.decode.request_table import TILE_BLOCKS, RequestTable
from picbench.kernels.cuda.device import gluon_serves, multiprocessors, overwrite, precision
from picbench.kernels.cuda.layout import key_value
from picbench.kernels.cuda.merge import merge, merge_splits
from picbench.kernels.cuda.repeated_launch import RepeatedLaunch
from picbench.kernels.cuda.visible_blocks import Ints
from picbench.kernels.paging import BLOCK_SIZE
from picbench.kernels.rope import RopeTable
from picbench.kernels.shape import HeadShape

# Programs of either kernel that a multiprocessor of an H200 holds at once (up to 70 KiB of shared
# memory each, for heads of 128).
_RESIDENT = 3
# What another split costs, as a share of the whole: its outputs are written, read and merged.
_SPLIT_COST = 0.005
# The most splits of a request.
_MOST_SPLITS = 64
# The most query heads that may share a KV head, for the Gluon kernel.
_MAX_GROUP = 16
# Visible blocks that one program looks up.
_SPAN = 1024
# Parts of tensors that are uploaded with each step: where they begin depends on its requests.
_PER_STEP = ["block_table", "table_rows", "lengths"]


def choose_splits(pairs: int, resident: int) -> int:
    """Splits of each of `pairs` (request, KV head), so that waves of programs fill the device.

    `resident` programs run at once; a last wave that is not full leaves some of them idle.
    """

    def gain(splits: int) -> float:
        waves = pairs * splits / resident
        return waves / math.ceil(waves) * (1 - _SPLIT_COST * splits)

    return max(range(1, _MOST_SPLITS + 1), key=gain)


class DecodeBatch:
    """Device buffers of one decode step, shared by all layers and kept from step to step.

    Addresses never change, so a CUDA graph that captured `decode` at some batch size may be
    replayed after any `fill` of that size. Without `gluon` Triton's kernel serves; `splits` fixes
    the splits of each request, which otherwise depend on the batch size.
    """

    def __init__(
        self,
        table: RequestTable,
        max_batch: int,
        shape: HeadShape,
        rope: RopeTable,
        *,
        gluon: bool = True,
        splits: int | None = None,
    ) -> None:
        self.table, self.shape, self.rope = table, shape, rope
        self.size = 0
        self.gluon = gluon and covers(shape, rope, table)
        self._chosen_splits = splits
        device = table.blocks.device
        width = table.blocks.shape[1]
        ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.blocks = torch.zeros(max_batch, width, **ints)
        self.seen = torch.zeros(max_batch, width, **ints)
        self.tiles = torch.zeros(max_batch, **ints)
        # What a step tells of its requests is together, so that one copy brings it.
        self._stride = stride = -(-max_batch // 4) * 4
        self._nothing = np.zeros(2 * stride + len(table.blocks), np.int32)
        self._nothing[2 * stride :] = -1
        self._told = torch.from_numpy(self._nothing).clone().to(device)
        self.table_rows = self._told[:max_batch]
        self.lengths = self._told[stride : stride + max_batch]
        #: Which request of the step has a row of the request table, -1 for none.
        self.place = self._told[2 * stride :]
        #: RoPE shifts of the tiles, and which row of them is each request's.
        self.shifts, self.shift_rows = table.rope_shift, self.table_rows
        self._resident = _RESIDENT * multiprocessors(device)
        most = max(n * self.splits(n) for n in range(1, max_batch + 1))
        floats: dict[str, Any] = {"dtype": torch.float32, "device": device}
        self.partial = torch.empty(most, shape.num_heads, shape.head_size, **floats)
        self.lse = torch.empty(most, shape.num_heads, **floats)
        self.options: dict[str, Any]
        kernel, self.options = _gluon(self) if self.gluon else _triton(self)
        self.launch_tiles, self.launch_merge = RepeatedLaunch(kernel), RepeatedLaunch(merge)

    @property
    def nbytes(self) -> int:
        """Device memory held, the request table's not counted."""
        held = (self.blocks, self.seen, self.tiles, self._told, self.partial, self.lse)
        return sum(t.nbytes for t in held)

    def splits(self, requests: int) -> int:
        """Splits of each request's keys in a batch of this size."""
        pairs = requests * self.shape.num_kv_heads
        return self._chosen_splits or choose_splits(pairs, self._resident)

    def fill(self, block_table: Tensor, table_rows: Tensor, lengths: Tensor) -> None:
        """Prepares a step of `len(table_rows)` requests; only new rows of the table are copied.

        `block_table` [requests, max_blocks], `table_rows` [requests], rows of the request table,
        and `lengths` [requests], the slots of each with this step's token, are int32 on the device.
        A length of 0 leaves a request out; a negative one means that it has no keys (padding).
        """
        self.size = len(table_rows)
        self.table_rows[: self.size].copy_(table_rows)
        self.lengths[: self.size].copy_(lengths)
        self.place.fill_(-1)
        self._look_up(block_table)

    def fill_from_host(self, block_table: Tensor, step: Ints) -> None:
        """`fill` with rows and lengths `step` [2, requests] int32 of the host, by one copy."""
        rows, lengths = step
        self.size = count = len(rows)
        told, stride = self._nothing.copy(), self._stride
        told[:count] = rows
        told[stride : stride + count] = lengths
        read = np.flatnonzero(lengths > 0)
        told[2 * stride + rows[read]] = read
        overwrite(self._told, told)
        self._look_up(block_table)

    def _look_up(self, block_table: Tensor) -> None:
        table = self.table
        table.flush()
        width = table.blocks.shape[1]
        listed = (table.blocks, table.seen, table.bounds, block_table)
        step = (self.table_rows, self.lengths, self.blocks, self.seen, self.tiles)
        strides = (width, block_table.stride(0))
        grid = (self.size, triton.cdiv(width, _SPAN))
        look_up_blocks[grid](*listed, *step, *strides, WIDTH=table.tile_blocks, SPAN=_SPAN)

    def attend(self, query: Tensor, kv_cache: Tensor, scale: float, out: Tensor) -> Tensor:
        """`decode` of this batch."""
        return decode(query, kv_cache, self, scale, out)


def decode(
    query: Tensor, kv_cache: Tensor, batch: DecodeBatch, scale: float, out: Tensor
) -> Tensor:
    """Attention of `query` [requests, num_heads, head_size] over the cache, into `out`.

    Queries are rotated by their logical positions. `out` has the shape of `query`; rows of
    requests that the batch leaves out are not touched, those of requests without keys are zeros.
    Slots that are not visible may hold anything, NaN included. Nothing is allocated.
    """
    read_tiles(query, kv_cache, batch, scale)
    count = batch.splits(batch.size)
    parts = (batch.partial, batch.lse, batch.tiles)
    merge_splits(batch.launch_merge, *parts, out[: batch.size], count)
    return out


def read_tiles(query: Tensor, kv_cache: Tensor, batch: DecodeBatch, scale: float) -> None:
    """Attention of `decode` over the tiles of the batch, split by split, into `batch.partial`."""
    shape = batch.shape
    key, value = key_value(kv_cache)
    count = batch.splits(batch.size)
    blocks = (batch.blocks, batch.seen, batch.shifts, batch.tiles, batch.shift_rows)
    parts = (batch.rope.cos_sin_cache, batch.partial, batch.lse, scale * LOG2E)
    strides = (query.stride(0), *key.stride()[:3], batch.blocks.stride(0), batch.shifts.stride(0))
    batch.launch_tiles(
        (shape.num_kv_heads, count, batch.size),
        (query, key, value, *blocks, *parts, *strides, count),
        {"HEADS": shape.num_heads, "GROUP": shape.group, **batch.options},
    )


def covers(shape: HeadShape, rope: RopeTable, table: RequestTable) -> bool:
    """Whether the Gluon kernel serves these heads here, over the tiles of `table`."""
    tiled = not table.unrotated and table.tile_blocks == TILE_BLOCKS
    return tiled and shape.group <= _MAX_GROUP and gluon_serves(shape, rope)


def _gluon(batch: DecodeBatch) -> tuple[Any, dict[str, int]]:
    from picbench.kernels.cuda.decode import hopper_decode

    return hopper_decode.decode_transposed, {
        "SIZE": batch.shape.head_size,
        "COLUMNS": max(8, triton.next_power_of_2(batch.shape.group)),
        "num_warps": 4,
    }


def _triton(batch: DecodeBatch) -> tuple[Any, dict[str, Any]]:
    shape, table = batch.shape, batch.table
    return split_kv.decode_tiles, {
        "HEAD": shape.head_size,
        "PACKED": max(16, triton.next_power_of_2(shape.group)),
        "ROTARY": batch.rope.rotary_dim,
        "NEOX": batch.rope.is_neox,
        "TILE": table.tile_blocks * BLOCK_SIZE,
        "UNROTATED": table.unrotated,
        "PRECISION": precision(shape.dtype),
        "num_warps": 4,
        "num_stages": _stages(batch),
    }


def _stages(batch: DecodeBatch) -> int:
    # One less than this many tiles of keys and values fill shared memory (227 KiB), with cosines
    # and sines in float32 where keys are cached without RoPE.
    row_bytes = batch.shape.head_size * batch.shape.dtype.itemsize
    if batch.table.unrotated:
        return 2 if row_bytes <= 256 else 1
    return 3 if row_bytes <= 512 else 2


# Of what depends on the step nothing is assumed: each assumption would be a kernel of its own.
@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=_PER_STEP)
def look_up_blocks(
    listed_blocks: tl.tensor,
    listed_seen: tl.tensor,
    bounds: tl.tensor,
    block_table: tl.tensor,
    table_rows: tl.tensor,
    lengths: tl.tensor,
    blocks: tl.tensor,
    seen: tl.tensor,
    tiles: tl.tensor,
    list_stride: tl.tensor,
    table_stride: tl.tensor,
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
) -> None:
    """Fills `blocks`, `seen` [requests, width] and `tiles` [requests]; all tensors are int32.

    Grid (requests, width / SPAN). The visible blocks of request r are those listed in row
    table_rows[r] of the request table (`listed_blocks`, `listed_seen`, `bounds`), then the tail, in
    tiles of WIDTH. Their indices become cache blocks by `block_table` [requests, max_blocks], and
    slots after the first lengths[r] are cleared from `seen`. A length of 0 makes no tiles, a
    negative one -1, which `merge` takes for a request without keys.
    """
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(table_rows + request).to(tl.int64)
    length = tl.load(lengths + request)
    listed = tl.load(bounds + row * 2)
    tail = tl.load(bounds + row * 2 + 1)
    tail_blocks = tl.maximum(tl.cdiv(length, 16) - tail, 0)
    count = tl.where(length > 0, listed + tl.cdiv(tail_blocks, WIDTH), 0)
    if tl.program_id(1) == 0:
        tl.store(tiles + request, tl.where(length < 0, -1, count))
    place = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    wanted = place < count * WIDTH
    known = wanted & (place < listed * WIDTH)
    index = tl.load(listed_blocks + row * list_stride + place, mask=known, other=0)
    bits = tl.load(listed_seen + row * list_stride + place, mask=known, other=0xFFFF)
    index = tl.where(known, index, tail + place - listed * WIDTH)
    filled = tl.minimum(tl.maximum(length - index * 16, 0), 16)
    bits = tl.where(index >= 0, bits & ((1 << filled) - 1), 0)
    block = tl.load(
        block_table + request * table_stride + index, mask=wanted & (bits != 0), other=0
    )
    tl.store(blocks + request * list_stride + place, block, mask=wanted)
    tl.store(seen + request * list_stride + place, bits, mask=wanted)
