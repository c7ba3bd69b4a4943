"""One step of a model runner's planned requests, and what each of them knows. Host side.

vLLM's runner counts physical positions (slots in compute order). Without speculation it has them on
the host in every step, also under async scheduling, so the logical positions of a step are computed
here and copied to the device once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from picbench.engines.planning.pages import GAP
from picbench.engines.vllm.worker.arrangement import Arrangement, Tokens
from picbench.engines.vllm.worker.slot_map import Positions
from picbench.kernels.cuda.prefill.logical_order import LogicalOrder
from picbench.kernels.slot_runs import SlotRuns


@dataclass(frozen=True)
class PlannedRequest:
    """The slots of one request, in compute order.

    `runs` are the planned slots: their logical positions (GAP: never visible), and by how many
    positions their keys are rotated when they are read. Generated slots follow, the first at
    position `end`. With `keys_without_rope` their shifts are their positions, else 0. `arrangement`
    has the tokens of computed slots that the scheduler does not know.
    """

    row: int
    runs: SlotRuns
    end: int
    keys_without_rope: bool
    arrangement: Arrangement | None = None

    @cached_property
    def order(self) -> LogicalOrder:
        """The planned slots in logical order."""
        return LogicalOrder.of_runs(self.runs)

    @cached_property
    def planned(self) -> int:
        """Number of planned slots."""
        return len(self.runs)

    @cached_property
    def last(self) -> int:
        """Logical position of the last planned slot."""
        return self.position(self.planned - 1)

    @property
    def ordinary(self) -> bool:
        """Whether the planned slots are like those of a request without a plan.

        They are where a chunk is compiled alone. Pads at the end make no difference, because no
        other token of the prompt sees them.
        """
        starts, positions = self.runs.starts, self.runs.positions
        seen = positions != GAP
        inside = int(np.count_nonzero(seen))
        unmoved = seen[:inside].all() and np.array_equal(positions[:inside], starts[:inside])
        shifts = self.runs.rope_shift
        return bool(unmoved) and shifts is not None and not shifts.any()

    def position(self, slot: int) -> int:
        """Logical position of one slot."""
        if slot >= self.planned:
            return self.end + slot - self.planned
        return int(self.runs.kpos(slot, slot + 1)[0])

    def positions(self, start: int, stop: int) -> Positions:
        """Logical positions of the slots [start, stop)."""
        planned = self.planned
        if stop <= planned:
            return self.runs.kpos(start, stop)
        generated = np.arange(max(start, planned), stop, dtype=np.int32) + (self.end - planned)
        return np.concatenate([self.runs.kpos(start, planned), generated])

    def rope_shifts(self, stop: int) -> Positions:
        """RoPE shifts of the slots [0, stop)."""
        planned = self.planned
        if stop <= planned:
            return self.runs.shifts(0, stop)
        if self.keys_without_rope:
            beyond = self.positions(planned, stop)
        else:
            beyond = np.zeros(stop - planned, dtype=np.int32)
        return np.concatenate([self.runs.shifts(0, planned), beyond])


@dataclass(frozen=True)
class PlannedBatch:
    """The requests of one step in batch order; None for one without a plan.

    Request i computes `scheduled[i]` tokens after its `computed[i]` slots. `shares` says whether
    requests that decode read blocks together.
    """

    requests: tuple[PlannedRequest | None, ...]
    computed: tuple[int, ...]
    scheduled: tuple[int, ...]
    shares: bool = False

    @classmethod
    def dummy(cls, count: int, *, shares: bool = False) -> "PlannedBatch":
        """A batch of `count` planned requests that decode, for capturing graphs."""
        request = PlannedRequest(0, SlotRuns.plain(1), end=1, keys_without_rope=False)
        return cls((request,) * count, (0,) * count, (1,) * count, shares)

    @property
    def decodes(self) -> bool:
        """Whether every request computes one token that sees all slots before it."""
        return self.leading == len(self.requests)

    @cached_property
    def planned(self) -> list[bool]:
        """Whether each request is planned."""
        return [request is not None for request in self.requests]

    @cached_property
    def stock(self) -> bool:
        """Whether vLLM's attention serves the requests without a plan.

        It does if one of them computes several tokens. Otherwise they decode together with the
        planned ones, which saves launching vLLM's kernels.
        """
        return any(request is None for request in self.requests[self.leading :])

    @cached_property
    def leading(self) -> int:
        """Number of requests at the front that compute one token that sees all slots before it."""
        count = len(self.requests)
        return next((i for i in range(count) if not self.at_end(i)), count)

    @property
    def decoded(self) -> int:
        """Number of requests at the front that picbench's kernels decode.

        Where vLLM's attention runs too (`stock`), they skip those without a plan.
        """
        return 0 if self.stock and not any(self.planned[: self.leading]) else self.leading

    def positions(self) -> NDArray[np.int64]:
        """Logical positions of the step's tokens [tokens], 0 for pads, whose output is not used."""
        front = np.array([self._last(i) for i in range(self.leading)], np.int32)
        if self.decodes:
            return seen_or_zero(front).astype(np.int64)
        others = [self.logical(i) for i in range(self.leading, len(self.requests))]
        return seen_or_zero(np.concatenate([front, *others])).astype(np.int64)

    def tokens(self) -> Iterator[tuple[int, Tokens]]:
        """Token ids that the scheduler does not know, and the place in the step of the first."""
        start = 0
        for request, computed, count in zip(
            self.requests, self.computed, self.scheduled, strict=True
        ):
            if request is not None and request.arrangement is not None:
                begin, tokens = request.arrangement.fresh(computed, computed + count)
                if len(tokens):
                    yield start + begin - computed, tokens
            start += count

    def at_end(self, index: int) -> bool:
        """Whether a request computes one token that sees all slots before it."""
        request = self.requests[index]
        last = request is None or self.computed[index] + 1 >= request.planned
        return last and self.scheduled[index] == 1

    def _last(self, index: int) -> int:
        slot, request = self.computed[index], self.requests[index]
        return slot if request is None else request.position(slot)

    def logical(self, index: int) -> Positions:
        """Logical positions of one request's tokens, GAP for pads."""
        start, request = self.computed[index], self.requests[index]
        stop = start + self.scheduled[index]
        if request is None:
            return np.arange(start, stop, dtype=np.int32)
        return request.positions(start, stop)


def seen_or_zero(kpos: Positions) -> Positions:
    """`kpos` with 0 in place of GAP."""
    return np.where(kpos < GAP, kpos, np.int32(0))
