"""Fills the block ledger from a vLLM scheduler, stock or PIC, without changing what it does.

After each `schedule` every block is attributed: referenced ones slot by slot from the requests
that run, idle ones by the kind of their key. The two counts come from different places (requests
here, reference counts in vLLM's pool), and a mismatch is an error, not a rounding.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from picbench.engines.attribution import Attribution, Codes, Ids
from picbench.engines.config import BLOCK_SIZE
from picbench.engines.keys import is_canonical
from picbench.engines.ledger import KINDS, Snapshot
from picbench.engines.plan import Plan
from picbench.engines.vllm.hooks import listen
from picbench.engines.vllm.pool import key_of
from picbench.errors import EngineError

_CODE = {kind: code for code, kind in enumerate(KINDS)}
_FREE, _PREFIX, _CHUNK = _CODE["free"], _CODE["prefix_idle"], _CODE["chunk_idle"]
_HELD, _PROMPT, _DECODE, _PAD = (_CODE[k] for k in ("chunk", "prompt", "decode", "pad"))
_NONE: Ids = np.empty(0, dtype=np.int64)


@dataclass(slots=True)
class _End:
    """The blocks at a request's end that it has not filled, as they were last seen.

    `blocks` is vLLM's list of all of its blocks, `count` long. The first of `ids` [n] begins at
    slot `first`; `codes` [n, slots of a block] say what they hold.
    """

    blocks: list[Any]
    count: int
    computed: int
    planned: int
    first: int
    ids: Ids
    codes: Codes


class Observer:
    """Watches one scheduler; `on_block_evicted` and `reset` are vLLM's collector hooks.

    The hooks (vllm/v1/core/block_pool.py, `metrics_collector`) tell when a cached block is
    reused, so that a step costs time in what changed, not in the size of the pool.
    """

    def __init__(self, scheduler: Any) -> None:
        manager = scheduler.kv_cache_manager
        self._scheduler = scheduler
        self._pool = manager.block_pool
        self._cached = manager.coordinator.single_type_managers[0].num_cached_block
        self._blocks = manager.coordinator.single_type_managers[0].req_to_blocks
        self._size = int(manager.coordinator.single_type_managers[0].block_size)
        self._idle: Codes = np.full(self._pool.num_gpu_blocks, _FREE, dtype=np.uint8)
        self._seen = Attribution(self._pool.num_gpu_blocks, self._size, len(KINDS))
        self._ends: dict[str, _End] = {}
        self._known: dict[str, int] = {}
        self._ids: dict[str, tuple[list[Any], Ids]] = {}
        self._planned: dict[str, Codes] = {}
        self._snapshots: list[Snapshot] = []
        self._preemptions = 0
        self._began = time.monotonic()
        listen(self._pool, self)
        scheduler.schedule = self._observed(scheduler.schedule)
        scheduler._preempt_request = self._counted(scheduler._preempt_request)

    def begin(self) -> None:
        """Start a measurement: drop earlier snapshots and set the clock to zero."""
        self._snapshots = []
        self._began = time.monotonic()

    def note(self) -> None:
        """Take a snapshot between steps: the engine has nothing to do, and its clock runs on."""
        self._observe()

    @property
    def snapshots(self) -> list[Snapshot]:
        """One snapshot a step since the measurement began."""
        return list(self._snapshots)

    @property
    def preemptions(self) -> int:
        """How often a request lost its blocks since the engine started."""
        return self._preemptions

    def on_block_evicted(self, block: Any) -> None:
        """A block is handed out again; whatever it cached is gone."""
        self._idle[block.block_id] = _FREE

    def reset(self) -> None:
        """The cache was dropped."""
        self._idle[:] = _FREE

    def _observed(self, schedule: Callable[..., Any]) -> Callable[..., Any]:
        def observed(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self._observe()
            return output

        return observed

    def _counted(self, preempt: Callable[..., Any]) -> Callable[..., Any]:
        def counted(request: Any, *args: Any, **kwargs: Any) -> Any:
            self._preemptions += 1
            return preempt(request, *args, **kwargs)

        return counted

    def _observe(self) -> None:
        holding = self._holding()
        for gone in set(self._seen).difference(request.request_id for request in holding):
            self._seen.drop(gone)
        unsettled = [*self._others()]
        for request in holding:
            end = self._ends.get(request.request_id)
            if end is None or not self._goes_on(request, end):
                end = self._ends[request.request_id] = self._attribute(request)
            unsettled.append((end.ids, end.codes))
        self._forget()
        slots, used = self._seen.count([part for part in unsettled if len(part[0])])
        counts = slots / BLOCK_SIZE
        idle = np.bincount(self._idle[1:][~used[1:]], minlength=len(KINDS))
        counts += idle * (self._size // BLOCK_SIZE)
        self._check(int(used.sum()))
        self._snapshots.append(
            Snapshot(
                step=len(self._snapshots),
                time=time.monotonic() - self._began,
                pool=(self._pool.num_gpu_blocks - 1) * self._size // BLOCK_SIZE,
                blocks={kind: float(counts[code]) for kind, code in _CODE.items()},
            )
        )

    def _holding(self) -> list[Any]:
        """Requests that hold blocks: running, being loaded, or ended while they were."""
        scheduler = self._scheduler
        waiting = len(scheduler.waiting) + len(scheduler.kv_holding_waiting)
        if len(scheduler.requests) == len(scheduler.running) + waiting:
            return [*scheduler.running, *scheduler.kv_holding_waiting]
        return [r for r in scheduler.requests.values() if self._blocks.get(r.request_id)]

    def _register(self, request: Any, ids: Ids) -> None:
        """Note what the request's newly cached blocks will be once they are idle."""
        known, cached = (d.get(request.request_id, 0) for d in (self._known, self._cached))
        if cached == known:
            return
        blocks, first = self._blocks[request.request_id], min(known, cached)
        # Blocks that the request found are known: of a long prompt's hits, all.
        for place in np.flatnonzero(self._idle[ids[first:cached]] == _FREE) + first:
            key = key_of(blocks[place])
            if key is not None:
                self._idle[ids[place]] = _CHUNK if is_canonical(key) else _PREFIX
        self._known[request.request_id] = cached

    def _goes_on(self, request: Any, end: _End) -> bool:
        """Whether a request only went on generating within the blocks that it has not filled."""
        name, computed = request.request_id, request.num_computed_tokens
        begin, stop = end.computed - end.first, computed - end.first
        if (
            self._blocks.get(name) is not end.blocks
            or len(end.blocks) != end.count
            or self._cached.get(name, 0) != self._known.get(name, 0)
            or end.computed < end.planned
            or not begin <= stop < self._size
        ):
            return False
        end.codes.ravel()[begin:stop] = _DECODE
        end.computed = computed
        return True

    def _attribute(self, request: Any) -> _End:
        """Note the blocks that the request has filled, which stay as they are; give the others."""
        name, computed = request.request_id, int(request.num_computed_tokens)
        ids = self._block_ids(name)
        self._register(request, ids)
        full = min(computed // self._size, len(ids))
        if full < self._seen.blocks(name):
            self._seen.drop(name)
        known = self._seen.blocks(name)
        if full > known:
            self._seen.add(name, ids[known:full], self._slots(request, known, full))
        return _End(
            blocks=self._blocks.get(name, []),
            count=len(ids),
            computed=computed,
            planned=len(self._plan_codes(request)),
            first=full * self._size,
            ids=ids[full:],
            codes=self._slots(request, full, len(ids)),
        )

    def _slots(self, request: Any, first: int, last: int) -> Codes:
        """What the slots of some of a request's blocks hold [last - first, slots of a block]."""
        planned, computed = self._plan_codes(request), request.num_computed_tokens
        begin = first * self._size
        prompt = max(begin, min(computed, len(planned)))
        codes: Codes = np.full((last - first) * self._size, _PAD, dtype=np.uint8)
        codes[: max(0, computed - begin)] = _DECODE
        codes[: prompt - begin] = planned[begin:prompt][: len(codes)]
        return codes.reshape(-1, self._size)

    def _block_ids(self, request_id: str) -> Ids:
        """Ids of a request's blocks, which only ever get more while vLLM keeps them in one list.

        A request that lost its blocks (preempted, or a load failed) gets others in another list.
        """
        blocks: list[Any] = self._blocks.get(request_id, [])
        known, ids = self._ids.get(request_id, (blocks, _NONE))
        if known is not blocks:
            ids = _NONE
            self._known.pop(request_id, None)
            self._seen.drop(request_id)
        if len(ids) < len(blocks):
            fresh = np.array([b.block_id for b in blocks[len(ids) :]], dtype=np.int64)
            ids = np.concatenate([ids, fresh])
            self._ids[request_id] = blocks, ids
        return ids

    def _plan_codes(self, request: Any) -> Codes:
        if request.request_id not in self._planned:
            self._planned[request.request_id] = self._codes(request)
        return self._planned[request.request_id]

    def _codes(self, request: Any) -> Codes:
        linker = getattr(self._scheduler, "linker", None)
        plan: Plan | None = linker.plan_of(request.request_id) if linker else None
        if plan is None:
            return np.full(request.num_prompt_tokens, _PROMPT, dtype=np.uint8)
        codes = b"".join(bytes((_CODE[kind],)) * count for kind, count in plan.kind_runs)
        return np.frombuffer(codes, dtype=np.uint8)

    def _others(self) -> Iterator[tuple[Ids, Codes]]:
        """Blocks that no request holds that is running."""
        linker = getattr(self._scheduler, "linker", None)
        yield self._alike(linker.held() if linker else (), _HELD)
        # A step that still runs may write into blocks of a request that has ended meanwhile
        # (vllm/v1/core/sched/scheduler.py, _free_request_blocks); nothing in them is of use.
        for _, blocks in self._scheduler.deferred_frees:
            yield self._alike(blocks, _PAD)

    def _alike(self, blocks: Sequence[Any], code: int) -> tuple[Ids, Codes]:
        ids = np.array([block.block_id for block in blocks], dtype=np.int64)
        return ids, np.full((len(ids), self._size), code, dtype=np.uint8)

    def _forget(self) -> None:
        alive = self._scheduler.requests
        self._known = {k: v for k, v in self._known.items() if k in alive and k in self._cached}
        self._planned = {k: v for k, v in self._planned.items() if k in alive}
        self._ids = {k: v for k, v in self._ids.items() if k in alive}
        self._ends = {k: v for k, v in self._ends.items() if k in alive}

    def _check(self, used: int) -> None:
        expected = self._pool.num_gpu_blocks - 1 - self._pool.get_num_free_blocks()
        if used != expected:
            raise EngineError(
                f"the ledger sees {used} referenced blocks, vLLM's pool counts {expected}"
            )
