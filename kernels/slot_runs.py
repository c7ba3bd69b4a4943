"""A request's slots as runs, of which a prompt has a few hundred. Host side, numpy.

What is made of slots one by one takes time in proportion to the prompt, before the GPU gets its
first kernel of the step.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from picbench.kernels.paging import GAP

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SlotRuns:
    """Slots in compute order: runs of consecutive positions with one RoPE shift, or of hidden ones.

    Run i has the slots starts[i] .. starts[i + 1] (`starts` [runs + 1]), the first of them at
    positions[i], GAP if they are hidden, and the shift rope_shift[i]; all arrays are int32. Without
    `rope_shift` each visible slot's shift is its position, as where keys are cached without RoPE.
    """

    starts: Ints
    positions: Ints
    rope_shift: Ints | None

    @classmethod
    def of(cls, kpos: Ints, rope_shift: Ints) -> "SlotRuns":
        """Of logical positions (GAP: hidden) and RoPE shifts [slots], int32."""
        hidden = kpos == GAP
        breaks = (np.diff(kpos) != 1) & ~(hidden[1:] & hidden[:-1])
        bare = bool((hidden | (kpos == rope_shift)).all()) and not hidden.all()
        if not bare:
            breaks |= np.diff(rope_shift) != 0
        firsts = np.flatnonzero(np.concatenate([[len(kpos) > 0], breaks]))
        starts = np.append(firsts, len(kpos)).astype(np.int32)
        return cls(starts, kpos[firsts], None if bare else rope_shift[firsts])

    @classmethod
    def plain(cls, slots: int) -> "SlotRuns":
        """Slots at positions from 0 on, read as they are cached."""
        zero = np.zeros(1, np.int32)
        return cls(np.array([0, slots], np.int32), zero, zero)

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def counts(self) -> Ints:
        """Slots of each run."""
        return np.diff(self.starts)

    def unrotated(self) -> "SlotRuns":
        """The same slots if their keys are cached without RoPE."""
        return SlotRuns(self.starts, self.positions, None)

    def single(self) -> "SlotRuns":
        """The same slots in runs of one, each with its shift."""
        count = len(self)
        starts = np.arange(count + 1, dtype=np.int32)
        return SlotRuns(starts, self.kpos(0, count), self.shifts(0, count))

    def kpos(self, start: int, stop: int) -> Ints:
        """Logical positions of the slots [start, stop), GAP for hidden ones."""
        first, counts = self._within(start, stop)
        own = slice(first, first + len(counts))
        slots = np.arange(start, stop, dtype=np.int32)
        slots += np.repeat(self.positions[own] - self.starts[own], counts)
        # Hidden runs have ascended from GAP.
        return np.minimum(slots, GAP, out=slots)

    def shifts(self, start: int, stop: int) -> Ints:
        """RoPE shifts of the slots [start, stop)."""
        if self.rope_shift is None:
            kpos = self.kpos(start, stop)
            return np.where(kpos < GAP, kpos, np.int32(0))
        first, counts = self._within(start, stop)
        shifts: Ints = np.repeat(self.rope_shift[first : first + len(counts)], counts)
        return shifts

    def _within(self, start: int, stop: int) -> tuple[int, Ints]:
        """The first run with slots of [start, stop), and how many each run has from there on."""
        if stop <= start:
            return 0, np.zeros(0, np.int32)
        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        last = int(np.searchsorted(self.starts, stop, side="left"))
        return first, np.diff(np.clip(self.starts[first : last + 1], start, stop))
