"""What it costs to read blocks once for several requests, and when that pays. Pure functions."""

from dataclasses import dataclass

from picbench.kernels.cuda.decode.shared.group_rows import FEW_ROWS, ROWS
from picbench.kernels.paging import BLOCK_SIZE
from picbench.kernels.shape import HeadShape

# More readers than this are never waited for.
_MANY = 16


@dataclass(frozen=True, slots=True)
class SharingCosts:
    """How fast a device reads, multiplies and merges, in one layer's attention.

    `own_gb_ms` and `shared_gb_ms` are GB of keys and values that the kernel of single requests and
    that of groups read in a ms, `tflop_ms` what the latter multiplies in one, in 10^12 operations;
    `parts_gb_ms` GB of partial outputs that are written and read again in a ms. `launch_ms` is what
    the second kernel costs if it has nothing to do.

    The defaults are an H200's: its memory's 4.4 TB/s, and what its kernel of groups reached in 13
    cases (results/gpu/shared-decode.md). `picbench measure shared-decode` prints what it found.
    """

    own_gb_ms: float = 4.4
    shared_gb_ms: float = 3.0
    tflop_ms: float = 0.27
    parts_gb_ms: float = 3.0
    launch_ms: float = 0.004

    @classmethod
    def always(cls) -> "SharingCosts":
        """Those of a device on which it pays wherever two requests read the same."""
        return cls(own_gb_ms=1e-9, launch_ms=0.0)


@dataclass(frozen=True, slots=True)
class SharedReads:
    """What the groups of a step read: sums over all of them.

    `asked` counts blocks once for each reader, `loaded` once for each group, `multiplied` is
    `loaded` times the query rows of a program, over all its passes, and `parts` counts readers.
    """

    asked: int = 0
    loaded: int = 0
    multiplied: int = 0
    parts: int = 0

    def plus(self, blocks: int, readers: int, group: int) -> "SharedReads":
        """With a group that reads `blocks` for `readers`."""
        return SharedReads(
            self.asked + blocks * readers,
            self.loaded + blocks * (readers > 0),
            self.multiplied + blocks * query_rows(readers, group),
            self.parts + readers,
        )


def query_rows(readers: int, group: int) -> int:
    """Rows that the products of a group have, those that are not used counted."""
    passes, rest = divmod(readers, max(1, ROWS // group))
    few = rest <= FEW_ROWS // group
    return passes * ROWS + (0 if rest == 0 else FEW_ROWS if few else ROWS)


def own_ms(reads: SharedReads, shape: HeadShape, costs: SharingCosts) -> float:
    """Milliseconds a layer if each request reads its blocks alone."""
    return reads.asked * block_gb(shape) / costs.own_gb_ms


def shared_ms(reads: SharedReads, shape: HeadShape, costs: SharingCosts) -> float:
    """Milliseconds a layer if groups read theirs; reading and multiplying go on at once."""
    reading = reads.loaded * block_gb(shape) / costs.shared_gb_ms
    multiplying = products(reads, shape) / costs.tflop_ms
    part = shape.num_heads * (shape.head_size * shape.dtype.itemsize + 4)
    merging = 2e-9 * reads.parts * part / costs.parts_gb_ms
    return max(reading, multiplying) + merging


def pays(reads: SharedReads, shape: HeadShape, costs: SharingCosts) -> bool:
    """Whether a step whose groups read this is faster with them."""
    if not reads.parts:
        return False
    return shared_ms(reads, shape, costs) + costs.launch_ms < own_ms(reads, shape, costs)


def least_readers(blocks: int, shape: HeadShape, costs: SharingCosts) -> int:
    """The fewest readers, two or more, for which a cell of this many blocks is read once.

    One that has a single reader is always left to the kernel of single requests.
    """
    for readers in range(2, _MANY):
        reads = SharedReads().plus(blocks, readers, shape.group)
        if shared_ms(reads, shape, costs) < own_ms(reads, shape, costs):
            return readers
    return _MANY


def products(reads: SharedReads, shape: HeadShape) -> float:
    """Operations of the products of a layer's groups, in 10^12."""
    return 4e-12 * reads.multiplied * BLOCK_SIZE * shape.num_kv_heads * shape.head_size


def block_gb(shape: HeadShape) -> float:
    """GB of keys and values of a layer's block."""
    slot = 2 * shape.num_kv_heads * shape.head_size * shape.dtype.itemsize
    return BLOCK_SIZE * slot * 1e-9
