"""The planned requests that a worker knows: where their slots stand in their prompts.

Everything here is on the host. vLLM's runner counts physical positions (slots in compute order);
with speculation off it knows them on the host for every step, also under async scheduling, so the
logical positions of a step are made here and copied to the device once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from picbench.engines.planning.pages import GAP
from picbench.engines.vllm.worker.slot_map import Positions, SlotMap
from picbench.errors import EngineError
from picbench.kernels.cuda.prefill.logical_order import LogicalOrder


class Rows(Protocol):
    """Device rows, one a request (`picbench.kernels.cuda.decode.request_table.RequestTable`)."""

    def put(self, row: int, kpos: Tensor, turns: Tensor) -> None:
        """Write a row: logical positions and turns of the planned slots, both [slots] int32."""
        ...


@dataclass(frozen=True)
class PlannedRequest:
    """The slots of one request, in compute order.

    `kpos` [slots] are the logical positions of the planned slots (GAP: never visible) and `turns`
    [slots] what their keys are turned by when they are read. Generated slots follow; the first
    stands at `end`, and with `unrotated` their keys are turned by their positions.
    """

    row: int
    kpos: Positions
    turns: Positions
    end: int
    unrotated: bool

    @cached_property
    def order(self) -> LogicalOrder:
        """The planned slots in logical order."""
        return LogicalOrder.of(torch.from_numpy(self.kpos), torch.from_numpy(self.turns))

    @property
    def ordinary(self) -> bool:
        """Whether the planned slots are those of a request without a plan.

        So it is for chunks that are compiled alone. Pads at the end change nothing: no other token
        of the prompt sees them.
        """
        seen = np.count_nonzero(self.kpos != GAP)
        return np.array_equal(self.kpos[:seen], np.arange(seen)) and not self.turns.any()

    def position(self, slot: int) -> int:
        """Logical position of one slot."""
        planned = len(self.kpos)
        return int(self.kpos[slot]) if slot < planned else self.end + slot - planned

    def positions(self, start: int, stop: int) -> Positions:
        """Logical positions of the slots [start, stop)."""
        planned = len(self.kpos)
        if stop <= planned:
            return self.kpos[start:stop]
        generated = np.arange(max(start, planned), stop, dtype=np.int32) + (self.end - planned)
        return np.concatenate([self.kpos[start:planned], generated])

    def turned(self, stop: int) -> Positions:
        """Turns of the slots [0, stop)."""
        planned = len(self.kpos)
        if stop <= planned:
            return self.turns[:stop]
        beyond = self.positions(planned, stop) if self.unrotated else np.zeros(stop - planned)
        return np.concatenate([self.turns, beyond.astype(np.int32)])


class PlannedRequests:
    """All planned requests of a model runner, by id.

    `rows` holds them on the device; None if nothing there reads them. With `unrotated` every key
    rests unrotated, as the papers describe it; then requests without a plan have to be turned as
    well and are treated as planned ones.
    """

    def __init__(self, most: int, rows: Rows | None, *, unrotated: bool = False) -> None:
        self._rows = rows
        self._unrotated = unrotated
        self._free = list(range(most))
        self._known: dict[str, PlannedRequest] = {}

    def add(self, request_id: str, params: Any, prompt: int) -> None:
        """Take a new or resumed request on, if it has a plan; `prompt` is its length in slots.

        `params` are its sampling parameters, in which the scheduler sends a `SlotMap`.
        Raises EngineError if there are more requests than rows.
        """
        self.remove(request_id)
        slot_map = SlotMap.sent(params)
        if slot_map is None:
            if not self._unrotated:
                return
            slot_map = SlotMap.plain(prompt)
        if not self._free:
            raise EngineError(f"no row is left for request {request_id}")
        kpos = slot_map.positions()
        turns = _seen_or_zero(kpos) if self._unrotated else slot_map.rope_shifts()
        request = PlannedRequest(self._free[-1], kpos, turns, slot_map.end, self._unrotated)
        if self._reads_as_it_rests(request, params):
            return
        self._known[request_id] = request
        self._free.pop()
        self._write(request, len(kpos) + params.max_tokens)

    def _reads_as_it_rests(self, request: PlannedRequest, params: Any) -> bool:
        continues = request.end == len(request.kpos) or params.max_tokens == 1
        return not self._unrotated and continues and request.ordinary

    def _write(self, request: PlannedRequest, slots: int) -> None:
        if self._rows is None:
            return
        stop = slots if self._unrotated else len(request.kpos)
        kpos, turns = request.positions(0, stop), request.turned(stop)
        self._rows.put(request.row, torch.from_numpy(kpos), torch.from_numpy(turns))

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._known

    def remove(self, request_id: str) -> None:
        """Forget a request; unknown ones are ignored."""
        request = self._known.pop(request_id, None)
        if request is not None:
            self._free.append(request.row)

    def batch(
        self, request_ids: Sequence[str], computed: Sequence[int], scheduled: Sequence[int]
    ) -> "PlannedBatch | None":
        """One step: request i computes `scheduled[i]` tokens behind its `computed[i]` slots.

        None if no request in it is planned.
        """
        known = tuple(self._known.get(request_id) for request_id in request_ids)
        if not any(known):
            return None
        return PlannedBatch(known, tuple(map(int, computed)), tuple(map(int, scheduled)))


@dataclass(frozen=True)
class PlannedBatch:
    """The requests of one step in batch order; None stands for one without a plan.

    Request i computes `scheduled[i]` tokens behind its `computed[i]` slots.
    """

    requests: tuple[PlannedRequest | None, ...]
    computed: tuple[int, ...]
    scheduled: tuple[int, ...]

    @classmethod
    def dummy(cls, count: int) -> "PlannedBatch":
        """A batch of `count` planned requests that decode, for capturing graphs."""
        one = np.zeros(1, dtype=np.int32)
        request = PlannedRequest(0, kpos=one, turns=one, end=1, unrotated=False)
        return cls((request,) * count, (0,) * count, (1,) * count)

    @property
    def decodes(self) -> bool:
        """Whether every request computes one token with all before it in view."""
        return self.leading == len(self.requests)

    @cached_property
    def planned(self) -> list[bool]:
        """Whether each request follows a plan."""
        return [request is not None for request in self.requests]

    @cached_property
    def stock(self) -> bool:
        """Whether vLLM's attention serves the requests without a plan.

        It does if one of them computes several tokens. Otherwise they decode beside the planned
        ones, and no kernel of vLLM's has to be launched.
        """
        return any(request is None for request in self.requests[self.leading :])

    @cached_property
    def leading(self) -> int:
        """Number of requests at the front that compute one token, with all before it in view."""
        count = len(self.requests)
        return next((i for i in range(count) if not self._at_end(i)), count)

    @property
    def decoded(self) -> int:
        """Number of requests at the front that picbench's kernels decode.

        Where vLLM's attention has a part (`stock`), they skip those without a plan.
        """
        return 0 if self.stock and not any(self.planned[: self.leading]) else self.leading

    def positions(self) -> NDArray[np.int64]:
        """Logical positions of the step's tokens [tokens]; pads, which nobody reads, get 0."""
        front = [self._last(i) for i in range(self.leading)]
        rest = [self.logical(i) for i in range(self.leading, len(self.requests))]
        return _seen_or_zero(np.concatenate([np.array(front, np.int32), *rest])).astype(np.int64)

    def _at_end(self, index: int) -> bool:
        request = self.requests[index]
        last = request is None or self.computed[index] + 1 >= len(request.kpos)
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


def _seen_or_zero(kpos: Positions) -> Positions:
    """`kpos` with 0 in place of GAP."""
    return np.where(kpos < GAP, kpos, np.int32(0))
