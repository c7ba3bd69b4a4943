"""The planned requests of a model runner, by id, and what the device knows of them. Host side."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from picbench.engines.config import BLOCK_SIZE
from picbench.engines.planning.pages import GAP
from picbench.engines.vllm.worker.cuda.planned_batch import (
    PlannedBatch,
    PlannedRequest,
    StepRequests,
)
from picbench.engines.vllm.worker.slot_map import Arrangement, SlotMap
from picbench.errors import EngineError
from picbench.kernels.cuda.decode.request_table import RequestTable
from picbench.kernels.cuda.visible_blocks import CanonicalBlocks
from picbench.kernels.rope import RopeTable
from picbench.kernels.slot_runs import SlotRuns

#: The least share of all plain requests' blocks that sharing has to save. Kernels of planned
#: requests read what is not shared at 0.97 to 1.0 of FlashAttention-3's speed, and a step in which
#: nothing was shared took 3 % longer with them (results/gpu/kernels.md, decode-sharing.md).
LEAST_SAVED = 0.1


@dataclass(frozen=True, slots=True)
class PlainRequest:
    """A request of `prompt` slots, the first of which are in `blocks`, all of them full."""

    prompt: int
    max_tokens: int
    blocks: tuple[int, ...]


class PlainPrefixes:
    """The running requests without a plan, and how many begin with which blocks.

    vLLM maps a common prefix, such as a system prompt, to the same blocks, and its attention reads
    these once for each request. If enough of what they read is shared, requests decode as planned
    ones instead, whose kernels read it once for all. Prefixes are compared by cells of
    `cell_blocks` blocks: two requests share the cells up to the first that differs. Adding and
    removing a request takes time in proportion to its own cells.
    """

    def __init__(self, cell_blocks: int) -> None:
        self._cell_blocks = cell_blocks
        self._requests: dict[str, PlainRequest] = {}
        # Blocks belong to one prefix, so a cell's blocks stand for all that precede it.
        self._readers: Counter[tuple[int, ...]] = Counter()
        self._total = 0
        self._saved = 0
        self._waiting: set[str] = set()

    @property
    def waiting(self) -> frozenset[str]:
        """Those that share a cell and were not taken yet; none unless it pays."""
        if self._saved < LEAST_SAVED * self._total or not self._waiting:
            return frozenset()
        first = slice(self._cell_blocks)
        cells = ((name, self._requests[name].blocks[first]) for name in self._waiting)
        return frozenset(name for name, cell in cells if self._readers[cell] > 1)

    def add(self, request_id: str, prompt: int, max_tokens: int, blocks: Sequence[int]) -> None:
        """A new or resumed request; `blocks` are the first of its blocks."""
        self.remove(request_id)
        whole = tuple(blocks[: prompt // BLOCK_SIZE])
        request = self._requests[request_id] = PlainRequest(prompt, max_tokens, whole)
        self._total += -(-prompt // BLOCK_SIZE)
        for cell in self._cells(request):
            self._saved += len(cell) * (self._readers[cell] > 0)
            self._readers[cell] += 1
        if len(whole) >= self._cell_blocks:
            self._waiting.add(request_id)

    def remove(self, request_id: str) -> None:
        """A request has ended; unknown ones are ignored."""
        request = self._requests.pop(request_id, None)
        self._waiting.discard(request_id)
        if request is None:
            return
        self._total -= -(-request.prompt // BLOCK_SIZE)
        for cell in self._cells(request):
            self._readers[cell] -= 1
            if self._readers[cell]:
                self._saved -= len(cell)
            else:
                del self._readers[cell]

    def take(self, request_id: str, computed: int) -> PlainRequest | None:
        """A waiting request, which decodes as a planned one from now on; None in its prompt."""
        request = self._requests[request_id]
        if computed < request.prompt:
            return None
        self._waiting.remove(request_id)
        return request

    def _cells(self, request: PlainRequest) -> list[tuple[int, ...]]:
        size, blocks = self._cell_blocks, request.blocks
        return [blocks[i : i + size] for i in range(0, len(blocks) - size + 1, size)]


class PlannedRequests:
    """All planned requests of a model runner, by id.

    `table` holds up to `most` of them on the device; None if no kernel reads it. With
    `keys_without_rope` all keys are cached without RoPE; then the keys of requests without a plan
    have to be rotated as well, and these requests are treated as planned ones. `slot_maps` are
    those of requests whose linked tokens are picked here. With `prefixes` requests without a plan
    that begin alike decode as planned ones where that pays. `rope` has the
    rows of temperatures.

    A request's row of the table is written when it first decodes. Steps before that do not read it,
    and until the first of them is queued the GPU may wait for the host.
    """

    def __init__(
        self,
        most: int,
        table: RequestTable | None,
        *,
        keys_without_rope: bool = False,
        prefixes: PlainPrefixes | None = None,
        rope: RopeTable | None = None,
    ) -> None:
        self._table = table
        self._prefixes = None if keys_without_rope else prefixes
        self._keys_without_rope = keys_without_rope
        self._rope = rope
        self._free = list(range(most))
        self._known: dict[str, PlannedRequest] = {}
        self._slots: dict[str, int] = {}
        self._canonical: dict[str, tuple[Sequence[int], SlotRuns]] = {}
        self._unwritten: set[str] = set()
        self._step: tuple[list[str], StepRequests] | None = None
        self.slot_maps: dict[str, SlotMap] = {}

    def add(self, request_id: str, params: Any, prompt: int, blocks: Sequence[int] = ()) -> None:
        """Add a new or resumed request of `prompt` slots, if it has a plan.

        `params` have the scheduler's `SlotMap`, `blocks` are its first, if they stay the same.
        Raises EngineError if there are more requests than rows.
        """
        self.remove(request_id)
        self._step = None
        slot_map = SlotMap.sent(params)
        if slot_map is None:
            if not self._keys_without_rope:
                if self._prefixes is not None:
                    self._prefixes.add(request_id, prompt, params.max_tokens, blocks)
                return
            slot_map = SlotMap.plain(prompt)
        if not self._free:
            raise EngineError(f"no row is left for request {request_id}")
        moved = slot_map.slot_runs(self._rope.row_of(slot_map.temperature) if self._rope else 0)
        runs = moved.unrotated() if self._keys_without_rope else moved
        request = PlannedRequest(self._free[-1], runs, slot_map.end, self._keys_without_rope)
        if slot_map.picks is not None:
            self.slot_maps[request_id] = slot_map
        else:
            continues = request.end == request.planned or params.max_tokens == 1
            if not self._keys_without_rope and continues and request.ordinary:
                return  # It runs as a plain one.
        self._known[request_id] = request
        self._slots[request_id] = request.planned + params.max_tokens
        # A copy, as the list of a running request grows.
        canonical = list(blocks[: slot_map.first_computed // BLOCK_SIZE])
        self._canonical[request_id] = canonical, moved
        self._free.pop()
        self._unwritten.add(request_id)

    def arrange(self, request_id: str, arrangement: Arrangement) -> None:
        """Arrange a request anew, whose linked tokens were picked."""
        before, kpos = self._known[request_id], arrangement.positions
        shifts = np.where(kpos < GAP, before.rope_shifts(len(kpos)), np.int32(0))
        runs = SlotRuns.of(kpos, shifts)
        if self._keys_without_rope:
            runs = runs.unrotated()
        request = replace(before, runs=runs, arrangement=arrangement)
        self._step = None
        self._known[request_id] = request
        self._unwritten.add(request_id)

    def _join_plain(
        self, request_ids: Sequence[str], computed: Sequence[int], scheduled: Sequence[int]
    ) -> None:
        """Plan those that share a prefix and decode in this step, while rows are left."""
        if self._prefixes is None or not (waiting := self._prefixes.waiting):
            return
        for request_id, before, count in zip(request_ids, computed, scheduled, strict=True):
            if request_id not in waiting or count != 1 or not self._free:
                continue
            if (plain := self._prefixes.take(request_id, before)) is None:
                continue
            row, runs = self._free.pop(), SlotRuns.plain(plain.prompt)
            self._step = None
            self._known[request_id] = PlannedRequest(row, runs, plain.prompt, False)
            self._slots[request_id] = plain.prompt + plain.max_tokens
            self._canonical[request_id] = plain.blocks, runs
            self._unwritten.add(request_id)

    def _write(self, request_id: str) -> None:
        self._unwritten.discard(request_id)
        if self._table is None:
            return
        request, (blocks, moved) = self._known[request_id], self._canonical[request_id]
        stop = self._slots[request_id] if self._keys_without_rope else request.planned
        kpos, shifts = request.positions(0, stop), request.rope_shifts(stop)
        positions = torch.from_numpy(kpos), torch.from_numpy(shifts)
        shifts_of_chunks = moved.shifts(0, min(len(blocks) * BLOCK_SIZE, len(moved)))
        canonical = CanonicalBlocks(np.array(blocks, np.int32), shifts_of_chunks)
        self._table.put(request.row, *positions, canonical)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._known

    def remove(self, request_id: str) -> None:
        """Remove a request; unknown ones are ignored."""
        if self._prefixes is not None:
            self._prefixes.remove(request_id)
        request = self._known.pop(request_id, None)
        self._slots.pop(request_id, None)
        self._canonical.pop(request_id, None)
        self.slot_maps.pop(request_id, None)
        if request is not None:
            self._step = None
            self._free.append(request.row)
            self._unwritten.discard(request_id)
            if self._table is not None:
                self._table.clear(request.row)

    def batch(
        self, request_ids: Sequence[str], computed: Sequence[int], scheduled: Sequence[int]
    ) -> "PlannedBatch | None":
        """One step: request i computes `scheduled[i]` tokens after its `computed[i]` slots.

        None if no request in it is planned.
        """
        self._join_plain(request_ids, computed, scheduled)
        # They are kept until a step has others or one of them has changed.
        if self._step is None or self._step[0] != request_ids:
            known = StepRequests(tuple(map(self._known.get, request_ids)))
            self._step = list(request_ids), known
        known = self._step[1]
        if not known.planned.any():
            return None
        shares = self._table is not None and self._table.shares
        counts = np.array(computed, np.int64), np.array(scheduled, np.int64)
        batch = PlannedBatch(known, *counts, shares)
        if not self._unwritten:
            return batch
        for request_id, at_end in zip(request_ids, batch.at_end.tolist(), strict=True):
            if at_end and request_id in self._unwritten:
                self._write(request_id)
        shares = self._table is not None and self._table.shares
        return replace(batch, shares=shares)
