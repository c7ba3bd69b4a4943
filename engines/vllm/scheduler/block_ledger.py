"""Fills the block ledger from a vLLM scheduler, stock or PIC, without changing what it does.

After each `schedule` every block is attributed: referenced ones slot by slot from the requests
that run, idle ones by the kind of their key. The two counts come from different places (requests
here, reference counts in vLLM's pool), and a mismatch is an error, not a rounding.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from picbench.engines.attribution import Attribution, Codes, Ids
from picbench.engines.config import BLOCK_SIZE
from picbench.engines.ledger import KINDS, Snapshot
from picbench.engines.planning.keys import is_canonical
from picbench.engines.planning.plan import Plan
from picbench.engines.vllm.scheduler.evictions import listen
from picbench.engines.vllm.scheduler.pool import key_of
from picbench.errors import EngineError

_CODE = {kind: code for code, kind in enumerate(KINDS)}
_FREE, _PREFIX, _CHUNK = _CODE["free"], _CODE["prefix_idle"], _CODE["chunk_idle"]
_HELD, _PROMPT, _DECODE, _PAD = (_CODE[k] for k in ("chunk", "prompt", "decode", "pad"))


@dataclass(slots=True)
class _Watched:
    """A request and its blocks, as they were last seen.

    `blocks` is vLLM's list of them: while it is the same it only gets longer, and a request that
    lost its blocks (preempted, or a load failed) gets others in another list. `planned` [slots]
    says what the prompt's slots hold. The first `full` of `ids` are filled and noted for good,
    `codes` [others, slots of a block] say what the others hold; `cached` blocks have a key.
    """

    blocks: list[Any]
    planned: Codes
    codes: Codes
    ids: Ids = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    full: int = 0
    computed: int = 0
    cached: int = 0


class BlockLedger:
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
        self._watched: dict[str, _Watched] = {}
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
        holding = {request.request_id: request for request in self._holding()}
        for gone in self._watched.keys() - holding.keys():
            self._seen.drop(gone)
            del self._watched[gone]
        unsettled = [*self._others()]
        for name, request in holding.items():
            watched = self._watch(name, request)
            if not self._goes_on(name, request.num_computed_tokens, watched):
                self._attribute(name, request.num_computed_tokens, watched)
            unsettled.append((watched.ids[watched.full :], watched.codes))
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

    def _watch(self, name: str, request: Any) -> _Watched:
        blocks: list[Any] = self._blocks.get(name, [])
        known = self._watched.get(name)
        if known is not None and known.blocks is blocks:
            return known
        self._seen.drop(name)
        none: Codes = np.empty((0, self._size), dtype=np.uint8)
        known = self._watched[name] = _Watched(blocks, self._codes(request), none)
        return known

    def _goes_on(self, name: str, computed: int, watched: _Watched) -> bool:
        """Whether a request only went on generating within the blocks that it has not filled."""
        begin = watched.full * self._size
        if (
            len(watched.ids) != len(watched.blocks)
            or watched.cached != self._cached.get(name, 0)
            or watched.computed < len(watched.planned)
            or not watched.computed <= computed < begin + self._size
        ):
            return False
        watched.codes.ravel()[watched.computed - begin : computed - begin] = _DECODE
        watched.computed = computed
        return True

    def _attribute(self, name: str, computed: int, watched: _Watched) -> None:
        """Note the blocks that a request has filled since, and what the others hold."""
        fresh = [block.block_id for block in watched.blocks[len(watched.ids) :]]
        watched.ids = np.append(watched.ids, np.array(fresh, dtype=np.int64))
        watched.computed = computed
        self._register(name, watched)
        full = min(computed // self._size, len(watched.ids))
        if full < watched.full:
            self._seen.drop(name)
            watched.full = 0
        if full > watched.full:
            settled = slice(watched.full, full)
            self._seen.add(name, watched.ids[settled], self._slots(watched, settled))
        watched.full = full
        watched.codes = self._slots(watched, slice(full, len(watched.ids)))

    def _register(self, name: str, watched: _Watched) -> None:
        """Note what the request's newly cached blocks will be once they are idle."""
        first, cached = watched.cached, self._cached.get(name, 0)
        # Blocks that the request found are known: of a long prompt's hits, all.
        for place in np.flatnonzero(self._idle[watched.ids[first:cached]] == _FREE) + first:
            key = key_of(watched.blocks[place])
            if key is not None:
                self._idle[watched.ids[place]] = _CHUNK if is_canonical(key) else _PREFIX
        watched.cached = cached

    def _slots(self, watched: _Watched, blocks: slice) -> Codes:
        """What the slots of some of a request's blocks hold [blocks, slots of a block]."""
        planned, computed = watched.planned, watched.computed
        begin, end = blocks.start * self._size, blocks.stop * self._size
        prompt = max(begin, min(computed, len(planned), end))
        codes: Codes = np.full(end - begin, _PAD, dtype=np.uint8)
        codes[: max(0, computed - begin)] = _DECODE
        codes[: prompt - begin] = planned[begin:prompt]
        return codes.reshape(-1, self._size)

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

    def _check(self, used: int) -> None:
        expected = self._pool.num_gpu_blocks - 1 - self._pool.get_num_free_blocks()
        if used != expected:
            raise EngineError(
                f"the ledger sees {used} referenced blocks, vLLM's pool counts {expected}"
            )
