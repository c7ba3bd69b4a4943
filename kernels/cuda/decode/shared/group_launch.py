"""How the kernels of groups are launched, and which heads they serve."""

from dataclasses import dataclass

import torch

from picbench.kernels.cuda.decode import attention
from picbench.kernels.cuda.decode.shared.group_rows import FEW_ROWS, PASSES, ROWS
from picbench.kernels.cuda.decode.shared.shared_table import SharedRequestTable
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


def serves_groups(shape: HeadShape) -> bool:
    """Whether a kernel of groups serves such heads: products have 16 rows and columns or more."""
    return shape.group <= FEW_ROWS and shape.head_size >= 32


def covers(shape: HeadShape, rope: RopeTable, table: SharedRequestTable) -> bool:
    """Whether the Gluon kernel serves these heads here, and all readers of a row of `table`."""
    readers = PASSES * (ROWS // shape.group)
    return attention.covers(shape, rope, table) and table.layout.readers <= readers
