"""The logical order of a request's slots, and its queries as runs. Host side, numpy."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from picbench.kernels.cuda.visible_blocks import Ints
from picbench.kernels.paging import GAP


@dataclass(frozen=True, slots=True)
class LogicalOrder:
    """The visible slots of a request by logical position, good for every step of its prefill.

    `slots`, `positions` and `rope_shift` [visible] int32: the request's slot, its logical position,
    and by how much its key is still to be rotated.
    """

    slots: Ints
    positions: Ints
    rope_shift: Ints

    @classmethod
    def of(cls, kpos: Tensor, rope_shift: Tensor) -> "LogicalOrder":
        """Sorts the slots of `kpos` and `rope_shift` [slots], CPU int32 in compute order."""
        positions = kpos.numpy()
        order = _sorted(positions)
        return cls(order, positions[order], rope_shift.numpy()[order])

    def by_slot(self) -> tuple[Ints, Ints]:
        """Positions (GAP: hidden) and RoPE shifts of all slots up to the last visible one."""
        count = int(self.slots.max(initial=-1)) + 1
        positions, rope_shift = np.full(count, GAP, np.int32), np.zeros(count, np.int32)
        positions[self.slots], rope_shift[self.slots] = self.positions, self.rope_shift
        return positions, rope_shift

    def seen(self, qpos: Ints) -> Ints:
        """How many keys each query sees: those at its logical position and before it.

        A padding query (qpos GAP) is given one key, because its output is thrown away.
        """
        counts = np.searchsorted(self.positions, qpos, side="right").astype(np.int32)
        return np.where(qpos == GAP, np.minimum(counts, 1), counts)


def _sorted(positions: Ints) -> Ints:
    """The visible slots by position: their runs are sorted, of which a prompt has a few hundred."""
    starts = np.concatenate([[0], np.flatnonzero(np.diff(positions) != 1) + 1])
    counts = np.diff(starts, append=len(positions))
    firsts = positions[starts[: len(positions)]]
    order = np.argsort(firsts, kind="stable")[: np.count_nonzero(firsts < GAP)]
    firsts, counts = firsts[order], counts[order]
    if (firsts[1:] < firsts[:-1] + counts[:-1]).any():
        visible = np.flatnonzero(positions < GAP)
        return visible[np.argsort(positions[visible], kind="stable")].astype(np.int32)
    begins = (starts[order] - (np.cumsum(counts) - counts)).astype(np.int32)
    return np.repeat(begins, counts) + np.arange(counts.sum(), dtype=np.int32)


def runs(seen: Ints) -> tuple[Ints, Ints]:
    """Cuts queries into runs in which each sees one key more than the one before.

    Returns where the runs begin (and the last one ends) [runs + 1], and how many keys the last
    query of each sees [runs].
    """
    cuts = np.flatnonzero(np.diff(seen) != 1) + 1
    starts = np.concatenate([[0], cuts, [len(seen)]]).astype(np.int32)
    return starts, seen[starts[1:] - 1].astype(np.int32)
