"""The logical order of a request's slots, and its queries as runs. Host side, numpy."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from picbench.kernels.cuda.visible_blocks import Ints
from picbench.kernels.paging import GAP
from picbench.kernels.slot_runs import SlotRuns


@dataclass(frozen=True, slots=True)
class LogicalOrder:
    """The visible slots of a request by logical position, good for every step of its prefill.

    They come in runs of consecutive slots at consecutive positions: `first_slot`, `first_position`
    and `counts` [runs] int32, and `before` [runs] int32, how many keys precede each. `rope_shift`
    [runs] int32 is by how much keys are still to be rotated; without it each by its position.
    `slots` are those of the request in compute order.
    """

    first_slot: Ints
    first_position: Ints
    counts: Ints
    before: Ints
    rope_shift: Ints | None
    slots: SlotRuns

    @classmethod
    def of(cls, kpos: Tensor, rope_shift: Tensor) -> "LogicalOrder":
        """Sorts the slots of `kpos` and `rope_shift` [slots], CPU int32 in compute order."""
        return cls.of_runs(SlotRuns.of(kpos.numpy(), rope_shift.numpy()))

    @classmethod
    def of_runs(cls, slots: SlotRuns) -> "LogicalOrder":
        """Sorts slots by their runs."""
        visible = np.flatnonzero((slots.positions < GAP) & (slots.counts > 0))
        order = visible[np.argsort(slots.positions[visible], kind="stable")]
        firsts, counts = slots.positions[order], slots.counts[order]
        if (counts > 1).any() and (firsts[1:] < firsts[:-1] + counts[:-1]).any():
            return cls.of_runs(slots.single())
        before = (np.cumsum(counts) - counts).astype(np.int32)
        shift = None if slots.rope_shift is None else slots.rope_shift[order]
        return cls(slots.starts[order], firsts, counts, before, shift, slots)

    def __len__(self) -> int:
        return int(self.counts.sum())

    def keys(self, most: int) -> tuple[Ints, Ints]:
        """Slots and RoPE shifts of the first keys by position, `most` at most."""
        runs = int(np.searchsorted(self.before, most))
        before, counts = self.before[:runs], self.counts[:runs].copy()
        if runs:
            counts[-1] = min(int(counts[-1]), most - int(before[-1]))
        place = np.arange(counts.sum(), dtype=np.int32)
        slots = np.repeat(self.first_slot[:runs] - before, counts) + place
        if self.rope_shift is None:
            return slots, np.repeat(self.first_position[:runs] - before, counts) + place
        return slots, np.repeat(self.rope_shift[:runs], counts)

    def seen(self, qpos: Ints) -> Ints:
        """How many keys each query sees: those at its logical position and before it.

        A padding query (qpos GAP) is given one key, because its output is thrown away.
        """
        if not len(self.counts):
            return np.zeros(len(qpos), np.int32)
        run = np.searchsorted(self.first_position, qpos, side="right") - 1
        own = np.minimum(qpos - self.first_position[run] + 1, self.counts[run])
        counts = np.where(run < 0, 0, self.before[run] + own)
        return np.where(qpos == GAP, np.minimum(counts, 1), counts).astype(np.int32)


def runs(seen: Ints) -> tuple[Ints, Ints]:
    """Cuts queries into runs in which each sees one key more than the one before.

    Returns where the runs begin (and the last one ends) [runs + 1], and how many keys the last
    query of each sees [runs].
    """
    cuts = np.flatnonzero(np.diff(seen) != 1) + 1
    starts = np.concatenate([[0], cuts, [len(seen)]]).astype(np.int32)
    return starts, seen[starts[1:] - 1].astype(np.int32)
