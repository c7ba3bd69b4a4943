"""What the slots of a request hold whose linked tokens its worker picks.

The scheduler reserves slots for them. All that it plans depends on how many there are, not on which
they are, so that it never waits for the worker's answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from picbench.engines.planning.pages import GAP
from picbench.engines.planning.policy import Picks
from picbench.engines.vllm.worker.slot_map import Positions, SlotMap
from picbench.errors import EngineError

Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The slots of a request in compute order, once its linked tokens are picked.

    `positions` [slots] are logical positions, GAP for canonical slots that linked tokens replace.
    `tokens` [slots - first] are the token ids of the computed slots, of which `first` is the first.
    """

    positions: Positions
    tokens: Tokens
    first: int

    def fresh(self, start: int, stop: int) -> tuple[int, Tokens]:
        """Token ids of the computed ones among the slots [start, stop), and where they begin."""
        begin = max(start, self.first)
        return begin, self.tokens[begin - self.first : max(stop, begin) - self.first]


@dataclass(frozen=True)
class Pickable:
    """A request before its linked tokens are picked.

    `positions` [slots] and `cached_at` [slots] are those of its slot map. `prompt` [tokens] has the
    user's token ids, and visible pads, in logical order.
    """

    picks: Picks
    positions: Positions
    cached_at: Positions
    first: int
    prompt: Tokens

    @classmethod
    def of(cls, slot_map: SlotMap, tokens: Sequence[int]) -> Self:
        """A request with picks; `tokens` [>= slots] are in compute order.

        Raises EngineError if the slots do not hold the whole prompt.
        """
        assert slot_map.picks is not None
        positions, cached_at = slot_map.positions(), slot_map.cached_at()
        seen = np.flatnonzero(positions != GAP)
        prompt = np.full(slot_map.end, -1, dtype=np.int32)
        prompt[positions[seen]] = np.asarray(tokens[: len(positions)], dtype=np.int32)[seen]
        if len(seen) != slot_map.end or (prompt < 0).any():
            raise EngineError(f"{len(seen)} of {slot_map.end} prompt tokens have slots")
        return cls(slot_map.picks, positions, cached_at, slot_map.first_computed, prompt)

    @cached_property
    def slots(self) -> NDArray[np.int64]:
        """Canonical slots of the tokens that may be picked, in logical order."""
        slots = np.flatnonzero(self.positions[: self.first] != GAP)
        order: NDArray[np.int64] = slots[np.argsort(self.positions[slots])]
        return order

    @property
    def computed(self) -> Positions:
        """Positions of the tokens that are computed whatever is picked, ascending."""
        positions = self.positions[self.first :]
        fixed: Positions = positions[positions != GAP]
        return fixed

    @property
    def stop(self) -> int:
        """The position after the last token that may be picked."""
        return int(self.positions[self.slots[-1]]) + 1

    def arrange(self, picked: NDArray[np.int64]) -> Arrangement:
        """Link the tokens `picked` [count], given as indices into `slots`."""
        positions = self.positions.copy()
        gone = self.slots[picked]
        linked, computed = positions[gone], positions[self.first :]
        positions[gone] = GAP
        computed[: len(linked)] = linked
        computed.sort()
        return Arrangement(positions, self.prompt[computed], self.first)
