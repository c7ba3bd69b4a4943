"""The logical order of a request's slots, and its queries as runs. Host side, numpy."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from picbench.kernels.paging import GAP

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LogicalOrder:
    """The visible slots of a request by logical position, good for every step of its prefill.

    `slots`, `positions` and `turns` [visible] int32: the request's slot, its logical position,
    and how far its key is still to be rotated.
    """

    slots: Ints
    positions: Ints
    turns: Ints

    @classmethod
    def of(cls, kpos: Tensor, turns: Tensor) -> "LogicalOrder":
        """Sorts the slots described by `kpos` and `turns`, CPU int32 in compute order."""
        positions = kpos.numpy()
        order = np.argsort(positions, kind="stable")
        order = order[: int(np.searchsorted(positions[order], GAP))]
        return cls(order.astype(np.int32), positions[order], turns.numpy()[order])

    def by_slot(self) -> tuple[Ints, Ints]:
        """Positions and turns of all slots up to the last visible one; hidden ones stand at GAP."""
        count = int(self.slots.max(initial=-1)) + 1
        positions, turns = np.full(count, GAP, np.int32), np.zeros(count, np.int32)
        positions[self.slots], turns[self.slots] = self.positions, self.turns
        return positions, turns

    def seen(self, qpos: Ints) -> Ints:
        """How many keys each query sees: those at its logical position and before it.

        A padding query (qpos GAP) is given one key, because its output is thrown away.
        """
        counts = np.searchsorted(self.positions, qpos, side="right").astype(np.int32)
        return np.where(qpos == GAP, np.minimum(counts, 1), counts)


def runs(seen: Ints) -> tuple[Ints, Ints]:
    """Cuts queries into runs in which each sees one key more than the one before.

    Returns where the runs begin (and the last one ends) [runs + 1], and how many keys the last
    query of each sees [runs].
    """
    cuts = np.flatnonzero(np.diff(seen) != 1) + 1
    starts = np.concatenate([[0], cuts, [len(seen)]]).astype(np.int32)
    return starts, seen[starts[1:] - 1].astype(np.int32)
