"""Paged prefill in place: query tiles read keys from the pages in which they are cached.

A query tile is re-rotated whenever the RoPE shift of its next key tile differs
(`hopper_prefill`), where `gather_rotated` rotates every key and copies it. That is faster where
queries are few: a copy of 32k keys takes a third of the time in which 256 queries attend to them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import triton
from torch import Tensor

from picbench.kernels.cuda.base_two import LOG2E
from picbench.kernels.cuda.device import gluon_serves, multiprocessors, upload_all
from picbench.kernels.cuda.layout import cache_slots, key_value
from picbench.kernels.cuda.merge import merge, merge_splits
from picbench.kernels.cuda.prefill.paged.key_tiles import KEYS, KeyTiles
from picbench.kernels.cuda.prefill.paged.tile_schedule import QueryTile, TileSchedule
from picbench.kernels.cuda.prefill.query_tile import ROWS
from picbench.kernels.cuda.repeated_launch import RepeatedLaunch
from picbench.kernels.cuda.visible_blocks import Ints
from picbench.kernels.cuda.workspace import CudaWorkspace
from picbench.kernels.paging import BLOCK_BITS, BLOCK_SIZE, GAP
from picbench.kernels.rope import RopeTable
from picbench.kernels.shape import HeadShape

#: Of `KeyTiles`, what the kernel reads as it is.
_KEYS = ("kpos", "rope_shift", "shown")

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
    the queries' logical positions, -1 for padding. With `splits` > 1, `partial` [queries * splits,
    num_heads, head_size] and `lse` [queries * splits, num_heads], float32 in the workspace, hold
    their outputs. The launches are those of all layers.
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
    partial: Tensor
    lse: Tensor
    rope: RopeTable
    shape: HeadShape
    launch: RepeatedLaunch
    launch_merge: RepeatedLaunch

    @classmethod
    def of(
        cls,
        query_tiles: Sequence[QueryTile],
        keys: Sequence[KeyTiles],
        block_table: Tensor,
        rows: Sequence[int],
        qpos: Ints,
        rope: RopeTable,
        shape: HeadShape,
        workspace: CudaWorkspace,
    ) -> "PagedPrefill":
        """Schedules `query_tiles`; request i has keys[i] in the blocks of row rows[i] of the table.

        `block_table` [requests, blocks] is int32; `qpos` [queries] int32 are the logical positions
        of all queries, GAP for padding.
        """
        from picbench.kernels.cuda.prefill.paged.hopper_prefill import attend_paged

        device = block_table.device
        programs = max(1, multiprocessors(device) // shape.num_kv_heads)
        room = _max_splits(len(qpos), shape, workspace)
        schedule = TileSchedule.of(query_tiles, len(qpos), programs, room)
        joined = [np.concatenate([getattr(one, name) for one in keys]) for name in _KEYS]
        places = _places(keys, rows, block_table.shape[1])
        seen = np.where(qpos == GAP, -1, qpos)
        work, key_tiles, counts, at, kpos, rope_shift, shown, *found = upload_all(
            [schedule.work, schedule.key_tiles, schedule.splits, seen, *joined, *places], device
        )
        slots = cache_slots(block_table, *found)
        partial = _partial(len(at) * schedule.max_splits, schedule.max_splits, shape, workspace)
        tiles = (slots, kpos, rope_shift, shown, at)
        launches = (RepeatedLaunch(attend_paged), RepeatedLaunch(merge))
        scheduled = (work, key_tiles, counts, schedule.max_splits)
        return cls(*scheduled, *tiles, *partial, rope, shape, *launches)

    def attend(self, query: Tensor, kv_cache: Tensor, scale: float, out: Tensor) -> None:
        """Attention of `query` [queries, num_heads, head_size] over the cache, into `out`."""
        shape = self.shape
        key, value = key_value(kv_cache)
        keys = (self.key_tiles, self.slots, self.kpos, self.rope_shift, self.shown)
        step = (self.partial, self.lse, self.work, *keys, self.rope.cos_sin_cache, self.qpos)
        strides = (*query.stride()[:2], *out.stride()[:2], *key.stride()[:3])
        numbers = (scale * LOG2E, *strides, shape.num_kv_heads, self.splits)
        self.launch(
            (shape.num_kv_heads, len(self.work), 1),
            (query, key, value, out, *step, *numbers),
            {
                "SIZE": shape.head_size,
                "GROUP": shape.group,
                "PADDED": triton.next_power_of_2(shape.group),
                "SPLIT": self.splits > 1,
                "FLAT": strides[4] == BLOCK_SIZE * strides[5],
                "num_warps": 4,
            },
        )
        if self.splits > 1:
            merge_splits(
                self.launch_merge, self.partial, self.lse, self.split_counts, out, self.splits
            )


def keys_read(query_tiles: Sequence[QueryTile]) -> int:
    """Number of keys that query tiles read."""
    return KEYS * sum(tile.count for tile in query_tiles)


def _max_splits(queries: int, shape: HeadShape, workspace: CudaWorkspace) -> int:
    """The most splits of each query whose partial outputs fit the workspace."""
    split_bytes = 4 * shape.num_heads * (shape.head_size + 1)
    return max(1, workspace.nbytes // (split_bytes * queries))


def _partial(
    rows: int, splits: int, shape: HeadShape, workspace: CudaWorkspace
) -> tuple[Tensor, Tensor]:
    """Partial outputs and log-sum-exps of this many rows; without splits, of none."""
    count, heads = rows if splits > 1 else 0, shape.num_heads
    partial, lse = workspace.floats((count, heads, shape.head_size), (count, heads))
    return partial, lse


def _places(keys: Sequence[KeyTiles], rows: Sequence[int], width: int) -> tuple[Ints, Ints, Ints]:
    """What `cache_slots` asks for of each key [tiles, 128], in a block table of this width."""
    own = np.concatenate([one.slots for one in keys])
    first = np.array(rows, np.int32) * np.int32(width)
    before = np.repeat(first, [len(one.rope_shift) for one in keys])
    there = own >= 0
    at = np.where(there, (own >> BLOCK_BITS) + before[:, None], 0)
    offset = np.where(there, own & (BLOCK_SIZE - 1), -1)
    return at, offset, np.where(there, np.int32(BLOCK_SIZE), np.int32(0))
