"""Rows of integers that tell the kernel which requests read which blocks at once."""

from dataclasses import dataclass
from typing import ClassVar

from picbench.kernels.cuda.decode.shared.key_cells import CELL_BLOCKS

#: Query rows that one product multiplies with a tile of keys, where as many read it.
ROWS = 64
#: And where few do: the fewest rows of a product of Triton's.
FEW_ROWS = 16
#: Products that serve the readers of one row of `GroupRows`, where there are as many: 48 readers of
#: four heads. Where 64 requests draw half of the chunks each, more than that hardly ever share one.
PASSES = 3


@dataclass(frozen=True, slots=True)
class GroupRows:
    """Where a row [width] int32 has what.

    The first two integers are the number of blocks and of readers. From `blocks_at` on are the
    blocks of the pool, from `seen_at` bits of their visible slots, from `offsets_at` the positions
    to which slot 0 of each is rotated first; up to `cell_blocks` each. From `rows_at` on are the
    readers' rows of the request table, from `shifts_at` their RoPE shifts, from `parts_at` the rows
    that their partial outputs are written to; up to `readers` each.
    """

    cell_blocks: int
    readers: int
    blocks_at: ClassVar[int] = 2

    @classmethod
    def of(cls, group: int, cell_blocks: int = CELL_BLOCKS) -> "GroupRows":
        """For heads of which `group` share a KV head."""
        return cls(cell_blocks, PASSES * max(1, ROWS // group))

    @property
    def seen_at(self) -> int:
        """See the class."""
        return 2 + self.cell_blocks

    @property
    def offsets_at(self) -> int:
        """See the class."""
        return 2 + 2 * self.cell_blocks

    @property
    def rows_at(self) -> int:
        """See the class."""
        return 2 + 3 * self.cell_blocks

    @property
    def shifts_at(self) -> int:
        """See the class."""
        return self.rows_at + self.readers

    @property
    def parts_at(self) -> int:
        """See the class."""
        return self.rows_at + 2 * self.readers

    @property
    def width(self) -> int:
        """Integers of a row; a multiple of 16."""
        return -(-(self.rows_at + 3 * self.readers) // 16) * 16
