"""Link without a copy of the keys: rows of queries walk over the pages where keys rest.

The queries are turned back for each run of tiles that share a turn (`walk_kernel`), where `gather`
turns every key forward and copies it. It pays where queries are few: a copy of 32k keys takes a
third of the time in which 256 queries attend to them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from picbench.kernels.cuda.device import gluon_serves, multiprocessors
from picbench.kernels.cuda.layout import key_value
from picbench.kernels.cuda.merge import merge_parts
from picbench.kernels.cuda.prefill.paged.key_tiles import KEYS, KeyTiles
from picbench.kernels.cuda.prefill.paged.tile_schedule import Row, Visits
from picbench.kernels.cuda.prefill.tiled import ROWS, upload
from picbench.kernels.cuda.workspace import CudaWorkspace
from picbench.kernels.paging import BLOCK_SIZE, GAP
from picbench.kernels.rope import RopeTable
from picbench.kernels.shape import HeadShape

# The longest group of query heads that share a KV head: half the rows are one token's then.
_MOST_HEADS = ROWS // 2


def covers(shape: HeadShape, rope: RopeTable) -> bool:
    """Whether the kernel serves these heads here."""
    return shape.group <= _MOST_HEADS and gluon_serves(shape, rope)


@dataclass(frozen=True, slots=True)
class Walk:
    """The work of a step on the device (see `walk_kernel`), good for layers of one shape."""

    work: Tensor
    visits: Tensor
    counts: Tensor
    parts: int
    slots: Tensor
    kpos: Tensor
    turns: Tensor
    shown: Tensor
    qpos: Tensor
    rope: RopeTable
    shape: HeadShape
    workspace: CudaWorkspace

    @classmethod
    def of(
        cls,
        rows: Sequence[Row],
        keys: Sequence[KeyTiles],
        tables: Sequence[Tensor],
        qpos: np.ndarray,
        rope: RopeTable,
        shape: HeadShape,
        workspace: CudaWorkspace,
    ) -> "Walk":
        """Work on `rows`; request i has keys[i] in the blocks tables[i] [blocks] int32.

        `qpos` [queries] int32 are the logical positions of all queries; GAP, a pad's, sees nothing.
        """
        device = tables[0].device
        programs = max(1, multiprocessors(device) // shape.num_kv_heads)
        visits = Visits.of(rows, len(qpos), programs, _most_parts(len(qpos), shape, workspace))
        names = ("slots", "kpos", "turns", "shown")
        joined = [np.concatenate([getattr(one, name) for one in keys]) for name in names]
        work, tiles, counts, at, slots, kpos, turns, shown = _upload(
            [visits.work, visits.tiles, visits.parts, np.where(qpos == GAP, -1, qpos), *joined],
            device,
        )
        _resolve(slots, keys, tables)
        return cls(
            work, tiles, counts, visits.most, slots, kpos, turns, shown, at, rope, shape, workspace
        )

    def attend(self, query: Tensor, kv_cache: Tensor, scale: float, out: Tensor) -> None:
        """Attention of `query` [queries, num_heads, head_size] over the cache, into `out`."""
        from picbench.kernels.cuda.prefill.paged import hopper_prefill

        shape = self.shape
        key, value = key_value(kv_cache)
        partial, lse = self._partial(len(query))
        hopper_prefill.attend_walk[(shape.num_kv_heads, len(self.work))](
            query,
            key,
            value,
            out,
            partial,
            lse,
            self.work,
            self.visits,
            self.slots,
            self.kpos,
            self.turns,
            self.shown,
            self.rope.cos_sin_cache,
            self.qpos,
            scale * math.log2(math.e),
            query.stride(0),
            query.stride(1),
            out.stride(0),
            out.stride(1),
            key.stride(0),
            key.stride(1),
            key.stride(2),
            shape.num_kv_heads,
            self.parts,
            SIZE=shape.head_size,
            GROUP=shape.group,
            PADDED=triton.next_power_of_2(shape.group),
            CUT=self.parts > 1,
            FLAT=key.stride(0) == BLOCK_SIZE * key.stride(1),
            num_warps=4,
        )
        if self.parts > 1:
            merge_parts(partial, lse, self.counts, out, self.parts)

    def _partial(self, queries: int) -> tuple[Tensor, Tensor]:
        shape = self.shape
        count = queries * self.parts if self.parts > 1 else 0
        heads, size = shape.num_heads, shape.head_size
        partial, lse = self.workspace.floats((count, heads, size), (count, heads))
        return partial, lse


def visited(rows: Sequence[Row]) -> int:
    """Keys that rows of queries read."""
    return KEYS * sum(row.count for row in rows)


def _most_parts(queries: int, shape: HeadShape, workspace: CudaWorkspace) -> int:
    """Into how many parts queries may be cut for their outputs to fit the workspace."""
    part = 4 * shape.num_heads * (shape.head_size + 1)
    return max(1, workspace.nbytes // (part * queries))


def _resolve(slots: Tensor, keys: Sequence[KeyTiles], tables: Sequence[Tensor]) -> None:
    """Replaces requests' own slots [tiles, 128] by those of the cache; -1 stays."""
    start = 0
    for table, one in zip(tables, keys, strict=True):
        own = slots[start : start + len(one.turns)]
        blocks = table[own.clamp(min=0).long() // BLOCK_SIZE]
        own.copy_(torch.where(own < 0, -1, blocks * BLOCK_SIZE + own % BLOCK_SIZE))
        start += len(one.turns)


def _upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """The arrays on the device, by one copy; each begins at a multiple of 16 bytes."""
    padded = [-(-array.size // 4) * 4 for array in arrays]
    host = np.zeros(sum(padded), np.int32)
    begins = np.cumsum([0, *padded])
    for array, begin in zip(arrays, begins, strict=False):
        host[begin : begin + array.size] = array.ravel()
    there = upload(host, device)
    return [
        there[begin : begin + array.size].view(array.shape)
        for array, begin in zip(arrays, begins, strict=False)
    ]
