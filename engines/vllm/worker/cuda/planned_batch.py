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
from picbench.engines.vllm.worker.slot_map import Arrangement, Positions, Tokens, arranged_tokens
from picbench.kernels.cuda.prefill.logical_order import LogicalOrder
from picbench.kernels.slot_runs import SlotRuns

Counts = NDArray[np.int64]

#: Keys that the tokens of prompts without a plan may read together before vLLM's attention serves
#: them: as many as 1,024 tokens of a chunk that is compiled, for which the GPU waits for the host.
#: Of more keys FlashAttention-3 reads 1.2 in the time of one of ours (`link`).
_FEW_READS = 1024 * 1024


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
class StepRequests:
    """Requests in batch order, None for one without a plan; many steps in a row have the same ones.

    What a step has to know of each, so that nothing is looked up one by one; all are [requests].
    """

    requests: tuple[PlannedRequest | None, ...]

    @cached_property
    def planned(self) -> NDArray[np.bool_]:
        """Whether each is planned."""
        return np.array([request is not None for request in self.requests], bool)

    @cached_property
    def rows(self) -> Positions:
        """Rows of the request table, -1 without a plan."""
        return np.array([-1 if r is None else r.row for r in self.requests], np.int32)

    @cached_property
    def slots(self) -> Counts:
        """Numbers of planned slots, 0 without a plan."""
        return np.array([0 if r is None else r.planned for r in self.requests], np.int64)

    @cached_property
    def beyond(self) -> Counts:
        """By how much the positions of generated slots exceed the slots."""
        return np.array([0 if r is None else r.end - r.planned for r in self.requests], np.int64)

    @cached_property
    def last(self) -> Counts:
        """Positions of the last planned slots, 0 for pads and without a plan."""
        last = [0 if r is None else r.last for r in self.requests]
        return seen_or_zero(np.array(last, np.int32)).astype(np.int64)

    @cached_property
    def arranged(self) -> bool:
        """Whether the scheduler does not know the tokens of one of them."""
        return any(r is not None and r.arrangement is not None for r in self.requests)


@dataclass(frozen=True, eq=False)
class PlannedBatch:
    """The requests of one step, of which one at least is planned.

    Request i computes `scheduled[i]` tokens after its `computed[i]` slots. `shares` says whether
    requests that decode read blocks together.
    """

    known: StepRequests
    computed: Counts
    scheduled: Counts
    shares: bool = False

    @classmethod
    def dummy(cls, count: int, *, shares: bool = False) -> "PlannedBatch":
        """A batch of `count` planned requests that decode, for capturing graphs."""
        request = PlannedRequest(0, SlotRuns.plain(1), end=1, keys_without_rope=False)
        zeros = np.zeros(count, np.int64)
        return cls(StepRequests((request,) * count), zeros, zeros + 1, shares)

    @property
    def decodes(self) -> bool:
        """Whether every request computes one token that sees all slots before it."""
        return self.leading == len(self.known.requests)

    @cached_property
    def at_end(self) -> NDArray[np.bool_]:
        """Whether each request computes one token that sees all slots before it."""
        ends: NDArray[np.bool_] = self.scheduled == 1
        ends &= self.computed + 1 >= self.known.slots
        return ends

    @cached_property
    def stock(self) -> bool:
        """Whether vLLM's attention serves the requests without a plan.

        It does if they read more than `_FEW_READS` keys, or decode after a request that does not.
        Otherwise picbench's kernels serve them together with the planned ones, which saves
        launching vLLM's in every layer.
        """
        rest = slice(self.leading, None)
        plain = ~self.known.planned[rest]
        tokens = self.scheduled[rest][plain]
        reads = int(tokens @ (self.computed[rest][plain] + tokens))
        # The host schedules what is linked request by request, and many may decode.
        return bool((tokens == 1).any()) or reads > _FEW_READS

    @cached_property
    def leading(self) -> int:
        """Number of requests at the front that compute one token that sees all slots before it."""
        return len(self.at_end) if self.at_end.all() else int(self.at_end.argmin())

    @property
    def decoded(self) -> int:
        """Number of requests at the front that picbench's kernels decode.

        Where vLLM's attention runs too (`stock`), they skip those without a plan.
        """
        skipped = self.stock and not self.known.planned[: self.leading].any()
        return 0 if skipped else self.leading

    def positions(self) -> NDArray[np.int64]:
        """Logical positions of the step's tokens [tokens], 0 for pads, whose output is not used."""
        others = [self.logical(i) for i in range(self.leading, len(self.known.requests))]
        if not self.leading:
            return seen_or_zero(np.concatenate(others)).astype(np.int64)
        some, known = slice(self.leading), self.known
        slots = self.computed[some]
        generated = slots >= known.slots[some]
        front: Counts = np.where(generated, slots + known.beyond[some], known.last[some])
        if not others:
            return front
        return np.concatenate([front, seen_or_zero(np.concatenate(others))])

    def tokens(self) -> Iterator[tuple[int, Tokens]]:
        """Token ids that the scheduler does not know, and the place in the step of the first."""
        if not self.known.arranged:
            return
        arrangements = (None if r is None else r.arrangement for r in self.known.requests)
        yield from arranged_tokens(arrangements, self.computed.tolist(), self.scheduled.tolist())

    def logical(self, index: int) -> Positions:
        """Logical positions of one request's tokens, GAP for pads."""
        if (known := self._logical.get(index)) is not None:
            return known
        start, request = int(self.computed[index]), self.known.requests[index]
        stop = start + int(self.scheduled[index])
        if request is None:
            found = np.arange(start, stop, dtype=np.int32)
        else:
            found = request.positions(start, stop)
        self._logical[index] = found
        return found

    @cached_property
    def _logical(self) -> dict[int, Positions]:
        # Attention and the model both want them.
        return {}


def seen_or_zero(kpos: Positions) -> Positions:
    """`kpos` with 0 in place of GAP."""
    return np.where(kpos < GAP, kpos, np.int32(0))
