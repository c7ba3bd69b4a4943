"""The planned requests of a model runner, and which of them a step runs. Host side.

vLLM's runner counts physical positions (slots in compute order). Without speculation it has them on
the host in every step, also under async scheduling, so the logical positions of a step are computed
here and copied to the device once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from picbench.engines.config import BLOCK_SIZE
from picbench.engines.planning.pages import GAP
from picbench.engines.vllm.worker.arrangement import Arrangement, Tokens
from picbench.engines.vllm.worker.slot_map import Positions, SlotMap
from picbench.errors import EngineError
from picbench.kernels.cuda.prefill.logical_order import LogicalOrder
from picbench.kernels.cuda.visible_blocks import CanonicalBlocks


class DeviceTable(Protocol):
    """One row a request (`picbench.kernels.cuda.decode.request_table.RequestTable`)."""

    def put(
        self, row: int, kpos: Tensor, rope_shift: Tensor, canonical: CanonicalBlocks | None
    ) -> None:
        """Write logical positions and RoPE shifts of the planned slots, both [slots] int32.

        `canonical` are the first blocks, which other requests may see as well, where known.
        """
        ...

    def clear(self, row: int) -> None:
        """The request in a row has ended."""
        ...


@dataclass(frozen=True)
class PlannedRequest:
    """The slots of one request, in compute order.

    `kpos` [slots] are the logical positions of the planned slots (GAP: never visible), and
    `rope_shift` [slots] is by how many positions their keys are rotated when they are read.
    Generated slots follow, the first at position `end`. With `keys_without_rope` their shifts are
    their positions, else 0. `arrangement` has the tokens of computed slots that the scheduler does
    not know.
    """

    row: int
    kpos: Positions
    rope_shift: Positions
    end: int
    keys_without_rope: bool
    arrangement: Arrangement | None = None

    @cached_property
    def order(self) -> LogicalOrder:
        """The planned slots in logical order."""
        return LogicalOrder.of(torch.from_numpy(self.kpos), torch.from_numpy(self.rope_shift))

    @property
    def ordinary(self) -> bool:
        """Whether the planned slots are like those of a request without a plan.

        They are where a chunk is compiled alone. Pads at the end make no difference, because no
        other token of the prompt sees them.
        """
        seen = np.count_nonzero(self.kpos != GAP)
        return np.array_equal(self.kpos[:seen], np.arange(seen)) and not self.rope_shift.any()

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

    def rope_shifts(self, stop: int) -> Positions:
        """RoPE shifts of the slots [0, stop)."""
        planned = len(self.kpos)
        if stop <= planned:
            return self.rope_shift[:stop]
        if self.keys_without_rope:
            beyond = self.positions(planned, stop)
        else:
            beyond = np.zeros(stop - planned, dtype=np.int32)
        return np.concatenate([self.rope_shift, beyond])


class PlannedRequests:
    """All planned requests of a model runner, by id.

    `table` holds up to `most` of them on the device; None if no kernel reads it. With
    `keys_without_rope` all keys are cached without RoPE; then the keys of requests without a plan
    have to be rotated as well, and these requests are treated as planned ones. `slot_maps` are
    those of requests whose linked tokens are picked here.
    """

    def __init__(
        self, most: int, table: DeviceTable | None, *, keys_without_rope: bool = False
    ) -> None:
        self._table = table
        self._keys_without_rope = keys_without_rope
        self._free = list(range(most))
        self._known: dict[str, PlannedRequest] = {}
        self._slots: dict[str, int] = {}
        self._canonical: dict[str, CanonicalBlocks] = {}
        self.slot_maps: dict[str, SlotMap] = {}

    def add(self, request_id: str, params: Any, prompt: int, blocks: Sequence[int] = ()) -> None:
        """Add a new or resumed request of `prompt` slots, if it has a plan.

        `params` are its sampling parameters, in which the scheduler sends a `SlotMap`, `blocks` the
        first of its blocks, if they stay the same for as long as it is known here. Raises
        EngineError if there are more requests than rows.
        """
        self.remove(request_id)
        slot_map = SlotMap.sent(params)
        if slot_map is None:
            if not self._keys_without_rope:
                return
            slot_map = SlotMap.plain(prompt)
        if not self._free:
            raise EngineError(f"no row is left for request {request_id}")
        kpos = slot_map.positions()
        shifts = _seen_or_zero(kpos) if self._keys_without_rope else slot_map.rope_shifts(kpos)
        request = PlannedRequest(
            self._free[-1], kpos, shifts, slot_map.end, self._keys_without_rope
        )
        if slot_map.picks is not None:
            self.slot_maps[request_id] = slot_map
        elif self._runs_as_plain(request, params):
            return
        self._known[request_id] = request
        self._slots[request_id] = len(kpos) + params.max_tokens
        self._canonical[request_id] = _canonical(slot_map, kpos, blocks)
        self._free.pop()
        self._write(request_id)

    def arrange(self, request_id: str, arrangement: Arrangement) -> None:
        """Arrange a request anew, whose linked tokens were picked."""
        before, kpos = self._known[request_id], arrangement.positions
        if self._keys_without_rope:
            shifts = _seen_or_zero(kpos)
        else:
            shifts = np.where(kpos < GAP, before.rope_shift, np.int32(0))
        request = replace(before, kpos=kpos, rope_shift=shifts, arrangement=arrangement)
        self._known[request_id] = request
        self._write(request_id)

    def _runs_as_plain(self, request: PlannedRequest, params: Any) -> bool:
        continues = request.end == len(request.kpos) or params.max_tokens == 1
        return not self._keys_without_rope and continues and request.ordinary

    def _write(self, request_id: str) -> None:
        if self._table is None:
            return
        request = self._known[request_id]
        stop = self._slots[request_id] if self._keys_without_rope else len(request.kpos)
        kpos, shifts = request.positions(0, stop), request.rope_shifts(stop)
        positions = torch.from_numpy(kpos), torch.from_numpy(shifts)
        self._table.put(request.row, *positions, self._canonical[request_id])

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._known

    def remove(self, request_id: str) -> None:
        """Remove a request; unknown ones are ignored."""
        request = self._known.pop(request_id, None)
        self._slots.pop(request_id, None)
        self._canonical.pop(request_id, None)
        self.slot_maps.pop(request_id, None)
        if request is not None:
            self._free.append(request.row)
            if self._table is not None:
                self._table.clear(request.row)

    def batch(
        self, request_ids: Sequence[str], computed: Sequence[int], scheduled: Sequence[int]
    ) -> "PlannedBatch | None":
        """One step: request i computes `scheduled[i]` tokens after its `computed[i]` slots.

        None if no request in it is planned.
        """
        known = tuple(self._known.get(request_id) for request_id in request_ids)
        if not any(known):
            return None
        return PlannedBatch(known, tuple(map(int, computed)), tuple(map(int, scheduled)))


@dataclass(frozen=True)
class PlannedBatch:
    """The requests of one step in batch order; None for one without a plan.

    Request i computes `scheduled[i]` tokens after its `computed[i]` slots.
    """

    requests: tuple[PlannedRequest | None, ...]
    computed: tuple[int, ...]
    scheduled: tuple[int, ...]

    @classmethod
    def dummy(cls, count: int) -> "PlannedBatch":
        """A batch of `count` planned requests that decode, for capturing graphs."""
        one = np.zeros(1, dtype=np.int32)
        request = PlannedRequest(0, kpos=one, rope_shift=one, end=1, keys_without_rope=False)
        return cls((request,) * count, (0,) * count, (1,) * count)

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
        return next((i for i in range(count) if not self._at_end(i)), count)

    @property
    def decoded(self) -> int:
        """Number of requests at the front that picbench's kernels decode.

        Where vLLM's attention runs too (`stock`), they skip those without a plan.
        """
        return 0 if self.stock and not any(self.planned[: self.leading]) else self.leading

    def positions(self) -> NDArray[np.int64]:
        """Logical positions of the step's tokens [tokens], 0 for pads, whose output is not used."""
        front = [self._last(i) for i in range(self.leading)]
        others = [self.logical(i) for i in range(self.leading, len(self.requests))]
        return _seen_or_zero(np.concatenate([np.array(front, np.int32), *others])).astype(np.int64)

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


def _canonical(slot_map: SlotMap, kpos: Positions, blocks: Sequence[int]) -> CanonicalBlocks:
    """The blocks that hold canonical KV, as far as `blocks` names them."""
    ids = np.array(blocks[: slot_map.first_computed // BLOCK_SIZE], np.int32)
    return CanonicalBlocks(ids, slot_map.rope_shifts(kpos)[: len(ids) * BLOCK_SIZE])


def _seen_or_zero(kpos: Positions) -> Positions:
    """`kpos` with 0 in place of GAP."""
    return np.where(kpos < GAP, kpos, np.int32(0))
