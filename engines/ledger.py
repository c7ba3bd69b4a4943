"""The block ledger: what the blocks of the KV pool hold, at every scheduler step.

Counts are in blocks; a block that holds several kinds of slot is split by slots (1/16 steps, so
sums of floats stay exact). The counts of a snapshot always sum to the pool.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

#: Kinds of slot, as reports list them. `pad` is padding, the unfilled end of a last block, and what
#: a finished request holds until the step that may still write into it has ended.
KINDS = (
    "free",
    "prefix_idle",
    "chunk_idle",
    "chunk",
    "linked",
    "prompt",
    "private",
    "decode",
    "pad",
)

#: Kinds that no running request holds.
IDLE = ("free", "prefix_idle", "chunk_idle")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The pool after one scheduler step: blocks by kind, summing to `pool`.

    `time` is seconds since the engine's measurement began.
    """

    step: int
    time: float
    pool: int
    blocks: Mapping[str, float]

    @property
    def referenced(self) -> float:
        """Blocks that some running request holds."""
        return self.pool - sum(self.blocks[kind] for kind in IDLE)

    @property
    def resident(self) -> float:
        """Blocks that hold KV worth keeping, in use or idle."""
        return self.pool - self.blocks["free"]


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes that one worker of an engine holds; None where it cannot be known.

    `weights_bytes`, `pool_bytes` (KV) and `workspace_bytes` (picbench's attention) are counted
    tensor by tensor. On a GPU torch's allocator has given out `allocated_bytes` and taken
    `reserved_bytes` from the driver, which counts `driver_bytes` for the process, CUDA's context
    and code included. `process_bytes` is the process's resident memory.
    """

    device: str
    weights_bytes: int
    pool_bytes: int
    workspace_bytes: int
    process_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    driver_bytes: int | None = None

    @property
    def known_bytes(self) -> int:
        """Weights, pool and workspaces."""
        return self.weights_bytes + self.pool_bytes + self.workspace_bytes

    @property
    def held_bytes(self) -> int | None:
        """What the allocator has given out; on a CPU the resident memory of the process."""
        return self.process_bytes if self.device == "cpu" else self.allocated_bytes

    @property
    def residual_bytes(self) -> int | None:
        """What is held beside these three; negative where pages of them were never touched."""
        return None if self.held_bytes is None else self.held_bytes - self.known_bytes


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Peak and time-average of a series of snapshots, in blocks."""

    pool: int
    peak_referenced: float
    mean_referenced: float
    peak_resident: float
    mean_resident: float


def summarise(snapshots: Sequence[Snapshot]) -> Occupancy:
    """Peaks and time-weighted means; a snapshot holds until the next one begins."""
    if not snapshots:
        return Occupancy(0, 0.0, 0.0, 0.0, 0.0)
    return Occupancy(
        pool=snapshots[0].pool,
        peak_referenced=max(s.referenced for s in snapshots),
        mean_referenced=_time_mean(snapshots, [s.referenced for s in snapshots]),
        peak_resident=max(s.resident for s in snapshots),
        mean_resident=_time_mean(snapshots, [s.resident for s in snapshots]),
    )


def _time_mean(snapshots: Sequence[Snapshot], values: Iterable[float]) -> float:
    times = [s.time for s in snapshots]
    spans = [b - a for a, b in pairwise(times)]
    total = sum(spans)
    if total <= 0:
        return sum(values) / len(times)
    return sum(v * span for v, span in zip(values, spans, strict=False)) / total
