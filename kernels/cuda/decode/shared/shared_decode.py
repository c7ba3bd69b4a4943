"""Decode of planned requests that reads the blocks which several of them see once."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from picbench.kernels.cuda.base_two import LOG2E
from picbench.kernels.cuda.decode import attention
from picbench.kernels.cuda.decode.attention import DecodeBatch, read_tiles
from picbench.kernels.cuda.decode.shared.group_attention import attend_groups
from picbench.kernels.cuda.decode.shared.group_rows import FEW_ROWS, PASSES, ROWS
from picbench.kernels.cuda.decode.shared.private_tiles import TILES, look_up_private_tiles
from picbench.kernels.cuda.decode.shared.shared_table import SharedRequestTable
from picbench.kernels.cuda.device import multiprocessors, precision
from picbench.kernels.cuda.layout import key_value
from picbench.kernels.cuda.merge import merge_groups
from picbench.kernels.cuda.repeated_launch import RepeatedLaunch
from picbench.kernels.paging import BLOCK_SIZE
from picbench.kernels.rope import RopeTable
from picbench.kernels.shape import HeadShape


@dataclass(frozen=True, slots=True)
class GroupLaunch:
    """How the kernel of groups is launched; `resident` programs a multiprocessor.

    `keys` are those of a tile, `rows` the query rows of a product where enough requests read a
    cell. With `overlap` it runs beside the kernel of single requests, on a stream of its own. With
    `gluon` the kernel of `hopper_groups` serves where it can, with this many `buffers`; none of the
    former but `overlap` matters to it.
    """

    resident: int = 2
    rows: int = ROWS
    keys: int = 64
    stages: int = 3
    warps: int = 4
    overlap: bool = True
    gluon: bool = True
    buffers: int = 4

    @classmethod
    def of(cls, shape: HeadShape, *, unrotated: bool = False) -> "GroupLaunch":
        """What fits a multiprocessor's registers and 227 KiB of shared memory, for these heads.

        Keys that are rotated as they are read need room for a copy.
        """
        row_bytes = shape.head_size * shape.dtype.itemsize
        if row_bytes <= 256:
            return cls(stages=2 if unrotated else 3)
        keys = 32 if row_bytes <= 512 else 16
        return cls(keys=keys, stages=2, warps=4 if shape.dtype == torch.float32 else 8)


class SharedDecodeBatch(DecodeBatch):
    """A `DecodeBatch` whose requests read shared cells together, where that pays.

    Tiles that no group reads are read as by `DecodeBatch`. Addresses never change either, nor do
    grids: a CUDA graph may be replayed after requests came, went, or joined other groups.
    """

    table: SharedRequestTable

    def __init__(
        self,
        table: SharedRequestTable,
        max_batch: int,
        shape: HeadShape,
        rope: RopeTable,
        *,
        gluon: bool = True,
        splits: int | None = None,
        launch: GroupLaunch | None = None,
    ) -> None:
        super().__init__(table, max_batch, shape, rope, gluon=gluon, splits=splits)
        self.launch = launch or GroupLaunch.of(shape, unrotated=table.unrotated)
        #: Whether the Gluon kernel of groups serves.
        self.gluon_groups = gluon and self.launch.gluon and covers(shape, rope, table)
        device = table.blocks.device
        ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.shifts = torch.zeros(max_batch, table.rope_shift.shape[1], **ints)
        self.shift_rows = torch.arange(max_batch, **ints)
        self.counter = torch.zeros(16, **ints)
        size = (max(1, table.max_parts), shape.num_heads)
        self.parts = torch.empty(*size, shape.head_size, dtype=shape.dtype, device=device)
        self.part_lse = torch.empty(size, dtype=torch.float32, device=device)
        resident = 1 if self.gluon_groups else self.launch.resident
        self.programs = resident * multiprocessors(device)
        self._launch_groups = RepeatedLaunch(self._group_kernel())
        self._launch_joined = RepeatedLaunch(merge_groups)
        self._side = torch.cuda.Stream(device) if self._overlaps(device) else None  # type: ignore[no-untyped-call]

    def _group_kernel(self) -> Any:
        if not self.gluon_groups:
            return attend_groups
        from picbench.kernels.cuda.decode.shared.hopper_groups import attend_groups_hopper

        return attend_groups_hopper

    def _overlaps(self, device: torch.device) -> bool:
        return self.launch.overlap and device.type == "cuda"

    @property
    def nbytes(self) -> int:
        """Device memory held, the request table's not counted."""
        own = (self.shifts, self.shift_rows, self.counter)
        parts = (self.parts, self.part_lse)
        return super().nbytes + sum(t.nbytes for t in (*own, *parts))

    def _look_up(self, block_table: Tensor) -> None:
        # Requests that came or went since the last step count.
        table = self.table
        table.flush()
        table.flush_groups()
        listed = (table.blocks, table.seen, table.rope_shift, table.bounds)
        shared = (table.cell_of_tile, table.part_of, table.control)
        step = (block_table, self.table_rows, self.lengths, self.blocks, self.seen)
        own = (self.shifts, self.tiles, self.place)
        strides = (table.blocks.stride(0), table.rope_shift.shape[1], table.max_tiles)
        look_up_private_tiles[(self.size, triton.cdiv(table.max_tiles, TILES))](
            *(*listed, *shared, *step, *own, *strides, block_table.stride(0)),
            WIDTH=table.tile_blocks,
            TILES=TILES,
            SHIFTS=table.tile_blocks * BLOCK_SIZE if table.unrotated else 1,
        )

    def attend(self, query: Tensor, kv_cache: Tensor, scale: float, out: Tensor) -> Tensor:
        """`decode` of this batch: groups, then what each request reads alone, merged."""
        # In a graph it costs the host nothing that kernels run at once. Elsewhere it takes four
        # calls more, in steps that also link: there two GPUs were seen to wait for the host.
        if self._side is None or not torch.cuda.is_current_stream_capturing():
            self.read_groups(query, kv_cache, scale)
            read_tiles(query, kv_cache, self, scale)
        else:
            here = torch.cuda.current_stream()
            self._side.wait_stream(here)
            with torch.cuda.stream(self._side):
                self.read_groups(query, kv_cache, scale)
            read_tiles(query, kv_cache, self, scale)
            here.wait_stream(self._side)
        self.merge(out[: self.size])
        return out

    def read_groups(self, query: Tensor, kv_cache: Tensor, scale: float) -> None:
        """Attention of every group of readers over its cell, into `parts`."""
        shape, table, launch = self.shape, self.table, self.launch
        key, value = key_value(kv_cache)
        reads = (query, key, value, table.groups, table.control)
        parts = (self.place, self.rope.cos_sin_cache, self.parts, self.part_lse, scale * LOG2E)
        strides = (query.stride(0), *key.stride()[:3])
        sizes: dict[str, Any] = {
            "WIDTH": table.layout.width,
            "HEADS": shape.num_heads,
            "HEAD": shape.head_size,
            "GROUP": shape.group,
            "CELL": table.layout.cell_blocks,
            "READERS": table.layout.readers,
        }
        grid = (self.programs, 1, 1)
        if self.gluon_groups:
            options = sizes | {"STAGES": launch.buffers, "num_warps": 4}
            self._launch_groups(grid, (*reads, *parts, *strides), options)
            return
        options = {
            "ROWS": launch.rows,
            "FEW": FEW_ROWS,
            "ROTARY": self.rope.rotary_dim,
            "NEOX": self.rope.is_neox,
            "KEYS": launch.keys,
            "UNROTATED": table.unrotated,
            "PRECISION": precision(shape.dtype),
            "num_warps": launch.warps,
            "num_stages": launch.stages,
        }
        self._launch_groups(grid, (*reads, self.counter, *parts, *strides), sizes | options)

    def merge(self, out: Tensor) -> None:
        """Joins what groups and requests computed into `out` [requests, num_heads, head_size]."""
        requests, heads, size = out.shape
        table = self.table
        own = (self.partial, self.lse, self.tiles, self.lengths, self.table_rows)
        shared = (table.cells, table.part_of, table.control, self.counter, self.parts)
        numbers = (table.max_tiles, *out.stride()[:2], self.splits(self.size))
        self._launch_joined(
            (requests, heads, 1),
            (*own, *shared, self.part_lse, out, *numbers),
            {"HEADS": heads, "HEAD": size, "TILE": 16, "num_warps": 2},
        )


def serves_groups(shape: HeadShape) -> bool:
    """Whether a kernel of groups serves such heads: products have 16 rows and columns or more."""
    return shape.group <= FEW_ROWS and shape.head_size >= 32


def covers(shape: HeadShape, rope: RopeTable, table: SharedRequestTable) -> bool:
    """Whether the Gluon kernel serves these heads here, and all readers of a row of `table`."""
    readers = PASSES * (ROWS // shape.group)
    return attention.covers(shape, rope, table) and table.layout.readers <= readers
