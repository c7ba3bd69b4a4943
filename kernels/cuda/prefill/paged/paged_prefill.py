"""Paged prefill in place: query tiles read keys from the pages in which they are cached.

A query tile is re-rotated whenever the RoPE shift of its next key tile differs
(`hopper_prefill`), where `gather_rotated` rotates every key and copies it. That is faster where
queries are few: a copy of 32k keys takes a third of the time in which 256 queries attend to them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from picbench.kernels.cuda.device import gluon_serves, multiprocessors, upload_all
from picbench.kernels.cuda.layout import key_value
from picbench.kernels.cuda.merge import merge_splits
from picbench.kernels.cuda.prefill.paged.key_tiles import KEYS, KeyTiles
from picbench.kernels.cuda.prefill.paged.tile_schedule import QueryTile, TileSchedule
from picbench.kernels.cuda.prefill.query_tile import ROWS
from picbench.kernels.cuda.workspace import CudaWorkspace
from picbench.kernels.paging import BLOCK_BITS, BLOCK_SIZE, GAP
from picbench.kernels.rope import RopeTable
from picbench.kernels.shape import HeadShape

# The most query heads that may share a KV head: a query then takes half the rows of a tile.
_MAX_GROUP = ROWS // 2


def covers(shape: HeadShape, rope: RopeTable) -> bool:
    """Whether the kernel serves these heads here."""
    return shape.group <= _MAX_GROUP and gluon_serves(shape, rope)


@dataclass(frozen=True, slots=True)
class PagedPrefill:
    """A step's work on the device, good for all layers of one shape; all tensors are int32.

    `work` and `key_tiles` are those of `TileSchedule`, `split_counts` [queries] its `splits` and
    `splits` the largest of them. `slots` [tiles, 128] are cache slots; with `kpos`, `rope_shift`
    and `shown` they are otherwise those of `KeyTiles`, all requests' in a row. `qpos` [queries] are
    the queries' logical positions, -1 for padding.
    """

    work: Tensor
    key_tiles: Tensor
    split_counts: Tensor
    splits: int
    slots: Tensor
    kpos: Tensor
    rope_shift: Tensor
    shown: Tensor
    qpos: Tensor
    rope: RopeTable
    shape: HeadShape
    workspace: CudaWorkspace

    @classmethod
    def of(
        cls,
        query_tiles: Sequence[QueryTile],
        keys: Sequence[KeyTiles],
        tables: Sequence[Tensor],
        qpos: np.ndarray,
        rope: RopeTable,
        shape: HeadShape,
        workspace: CudaWorkspace,
    ) -> "PagedPrefill":
        """Schedules `query_tiles`; request i has keys[i] in the blocks tables[i] [blocks] int32.

        `qpos` [queries] int32 are the logical positions of all queries, GAP for padding.
        """
        device = tables[0].device
        programs = max(1, multiprocessors(device) // shape.num_kv_heads)
        room = _max_splits(len(qpos), shape, workspace)
        schedule = TileSchedule.of(query_tiles, len(qpos), programs, room)
        names = ("slots", "kpos", "rope_shift", "shown")
        joined = [np.concatenate([getattr(one, name) for one in keys]) for name in names]
        seen = np.where(qpos == GAP, -1, qpos)
        work, key_tiles, counts, at, slots, kpos, rope_shift, shown = upload_all(
            [schedule.work, schedule.key_tiles, schedule.splits, seen, *joined], device
        )
        _look_up_slots(slots, keys, tables)
        return cls(
            work,
            key_tiles,
            counts,
            schedule.max_splits,
            slots,
            kpos,
            rope_shift,
            shown,
            at,
            rope,
            shape,
            workspace,
        )

    def attend(self, query: Tensor, kv_cache: Tensor, scale: float, out: Tensor) -> None:
        """Attention of `query` [queries, num_heads, head_size] over the cache, into `out`."""
        from picbench.kernels.cuda.prefill.paged import hopper_prefill

        shape = self.shape
        key, value = key_value(kv_cache)
        partial, lse = self._partial(len(query))
        hopper_prefill.attend_paged[(shape.num_kv_heads, len(self.work))](
            query,
            key,
            value,
            out,
            partial,
            lse,
            self.work,
            self.key_tiles,
            self.slots,
            self.kpos,
            self.rope_shift,
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
            self.splits,
            SIZE=shape.head_size,
            GROUP=shape.group,
            PADDED=triton.next_power_of_2(shape.group),
            SPLIT=self.splits > 1,
            FLAT=key.stride(0) == BLOCK_SIZE * key.stride(1),
            num_warps=4,
        )
        if self.splits > 1:
            merge_splits(partial, lse, self.split_counts, out, self.splits)

    def _partial(self, queries: int) -> tuple[Tensor, Tensor]:
        shape = self.shape
        count = queries * self.splits if self.splits > 1 else 0
        heads, size = shape.num_heads, shape.head_size
        partial, lse = self.workspace.floats((count, heads, size), (count, heads))
        return partial, lse


def keys_read(query_tiles: Sequence[QueryTile]) -> int:
    """Number of keys that query tiles read."""
    return KEYS * sum(tile.count for tile in query_tiles)


def _max_splits(queries: int, shape: HeadShape, workspace: CudaWorkspace) -> int:
    """The most splits of each query whose partial outputs fit the workspace."""
    split_bytes = 4 * shape.num_heads * (shape.head_size + 1)
    return max(1, workspace.nbytes // (split_bytes * queries))


def _look_up_slots(slots: Tensor, keys: Sequence[KeyTiles], tables: Sequence[Tensor]) -> None:
    """Replaces the requests' own slots [tiles, 128] by those of the cache; -1 stays."""
    start = 0
    for table, one in zip(tables, keys, strict=True):
        own = slots[start : start + len(one.rope_shift)]
        # Hidden slots are in block -1, which is one of the table's as well.
        found = torch.add(own & (BLOCK_SIZE - 1), table[own >> BLOCK_BITS], alpha=BLOCK_SIZE)
        own.copy_(torch.where(own < 0, own, found))
        start += len(one.rope_shift)
