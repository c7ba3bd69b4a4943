"""The block ledger of a run as series over time, read back from its directory."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from picbench.engines.ledger import IDLE, KINDS

Array = npt.NDArray[np.float64]

#: Kinds of block that running requests hold.
HELD = tuple(kind for kind in KINDS if kind not in IDLE)


@dataclass(frozen=True, slots=True)
class Series:
    """The block ledger of one arm in one run: a value for each scheduler step.

    `time` is in seconds on the arm's own clock, `blocks` counts blocks by kind, and `pool` is how
    many there are.
    """

    time: Array
    blocks: Mapping[str, Array]
    pool: int

    @property
    def referenced(self) -> Array:
        """Blocks that running requests hold."""
        return np.asarray(self.pool - sum(self.blocks[kind] for kind in IDLE), dtype=np.float64)

    @property
    def resident(self) -> Array:
        """Blocks with KV in them, in use or idle."""
        return np.asarray(self.pool - self.blocks["free"], dtype=np.float64)

    def at_peak(self) -> dict[str, float]:
        """Blocks by kind, of the kinds that are held, when most blocks are referenced."""
        step = int(np.argmax(self.referenced))
        return {kind: float(self.blocks[kind][step]) for kind in HELD}


def read_series(path: Path) -> dict[str, Series]:
    """The series of each arm in a run's memory.parquet."""
    table = pq.read_table(path)
    names = np.array(table["arm"].to_pylist())
    columns = {name: table[name].to_numpy() for name in ("time", "pool", *KINDS)}
    found: dict[str, Series] = {}
    for arm in dict.fromkeys(names):
        rows = names == arm
        blocks = {kind: columns[kind][rows] for kind in KINDS}
        found[str(arm)] = Series(columns["time"][rows], blocks, int(columns["pool"][rows][0]))
    return found
