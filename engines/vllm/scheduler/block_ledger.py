"""The block ledger of a vLLM scheduler, stock or picbench's, which it does not affect.

After each `schedule` every block is attributed: referenced ones slot by slot from the running
requests, idle ones by the kind of their key. The number of referenced blocks is known twice, from
the requests and from vLLM's reference counts; a mismatch is an error.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from picbench.engines.config import BLOCK_SIZE
from picbench.engines.ledger import KINDS, Snapshot
from picbench.engines.planning.keys import is_canonical
from picbench.engines.planning.plan import Plan
from picbench.engines.vllm.scheduler.attribution import Attribution, Codes, Ids
from picbench.engines.vllm.scheduler.pool import key_of, listen
from picbench.errors import EngineError

_CODE = {kind: code for code, kind in enumerate(KINDS)}
_FREE, _PREFIX, _CHUNK = _CODE["free"], _CODE["prefix_idle"], _CODE["chunk_idle"]
_HELD, _PROMPT, _DECODE, _PAD = (_CODE[k] for k in ("chunk", "prompt", "decode", "pad"))

#: Snapshots, of some 700 bytes each, that are kept where nothing is measured.
LATEST = 10_000


@dataclass(slots=True)
class _Watched:
    """A request's blocks at the last snapshot.

    `blocks` is vLLM's list of them, which only grows, but for a request that lost its blocks.
    `planned` [slots] are the kinds of the prompt's slots. The first `full` of `ids` are filled and
    attributed for good; `codes` [others, slots of a block] are those of the others. The first
    `cached` have a key.
    """

    blocks: list[Any]
    planned: Codes
    codes: Codes
    ids: Ids = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    full: int = 0
    computed: int = 0
    cached: int = 0


class BlockLedger:
    """Takes snapshots of one scheduler's blocks, and counts its preemptions and evictions.

    It listens to evictions, so that a snapshot takes time in proportion to what changed. Blocks of
    requests that have ended are free, whatever is in them, where none is `keeps` for others.
    """

    def __init__(self, scheduler: Any, *, keeps: bool = True) -> None:
        manager = scheduler.kv_cache_manager
        self._scheduler = scheduler
        self._pool = manager.block_pool
        self._cached = manager.coordinator.single_type_managers[0].num_cached_block if keeps else {}
        self._blocks = manager.coordinator.single_type_managers[0].req_to_blocks
        self._size = int(manager.coordinator.single_type_managers[0].block_size)
        self._idle: Codes = np.full(self._pool.num_gpu_blocks, _FREE, dtype=np.uint8)
        self._seen = Attribution(self._pool.num_gpu_blocks, self._size, len(KINDS))
        self._watched: dict[str, _Watched] = {}
        #: Preemptions since the engine started.
        self.preemptions = 0
        self._snapshots: deque[Snapshot]
        self._evictions = {"chunk": 0, "prefix": 0}
        self.forget()
        if keeps:
            listen(self._pool, self)
        scheduler.schedule = _followed_by(scheduler.schedule, self.note)
        scheduler._preempt_request = _followed_by(scheduler._preempt_request, self._preempted)

    def begin(self) -> None:
        """Start a measurement: drop earlier snapshots, set the clock to zero, and keep all."""
        self.forget()
        self._snapshots = deque()

    def forget(self) -> None:
        """End a measurement: drop snapshots, and keep the latest ones alone from now on.

        An engine that serves for days would keep gigabytes of steps that are not asked for.
        """
        self._snapshots = deque(maxlen=LATEST)
        self._steps = 0
        self._began = time.monotonic()

    @property
    def snapshots(self) -> list[Snapshot]:
        """One snapshot per step since the measurement began; without one those of the latest."""
        return list(self._snapshots)

    @property
    def evictions(self) -> dict[str, int]:
        """Blocks of chunk and of prefix KV that lost it since the engine started, by kind."""
        return dict(self._evictions)

    def on_block_evicted(self, block: Any) -> None:
        """A block is reused; it caches nothing any more."""
        self._idle[block.block_id] = _FREE
        key = key_of(block)
        if key is not None:
            self._evictions["chunk" if is_canonical(key) else "prefix"] += 1

    def reset(self) -> None:
        """The cache was dropped."""
        self._idle[:] = _FREE

    def note(self) -> None:
        """Take a snapshot, after a step or while the engine is idle."""
        holding = {request.request_id: request for request in self._holding()}
        for gone in self._watched.keys() - holding.keys():
            self._seen.drop(gone)
            del self._watched[gone]
        partial = [*self._others()]
        for name, request in holding.items():
            watched = self._watch(name, request)
            if not self._only_decoded(name, request.num_computed_tokens, watched):
                self._attribute(name, request.num_computed_tokens, watched)
            partial.append((watched.ids[watched.full :], watched.codes))
        slots, used = self._seen.count([blocks for blocks in partial if len(blocks[0])])
        counts = slots / BLOCK_SIZE
        idle = np.bincount(self._idle[1:][~used[1:]], minlength=len(KINDS))
        counts += idle * (self._size // BLOCK_SIZE)
        self._check(int(used.sum()))
        self._snapshots.append(
            Snapshot(
                step=self._steps,
                time=time.monotonic() - self._began,
                pool=(self._pool.num_gpu_blocks - 1) * self._size // BLOCK_SIZE,
                blocks={kind: float(counts[code]) for kind, code in _CODE.items()},
            )
        )
        self._steps += 1

    def _preempted(self) -> None:
        self.preemptions += 1

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

    def _only_decoded(self, name: str, computed: int, watched: _Watched) -> bool:
        """Whether a request has only decoded since, within its last block; note what it decoded."""
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
        """Attribute the blocks that a request has filled since, and the slots of the others."""
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
        """Note the kinds that the request's newly cached blocks will have once they are idle."""
        first, cached = watched.cached, self._cached.get(name, 0)
        # The blocks of hits are known already, and a long prompt has many.
        for place in np.flatnonzero(self._idle[watched.ids[first:cached]] == _FREE) + first:
            key = key_of(watched.blocks[place])
            if key is not None:
                self._idle[watched.ids[place]] = _CHUNK if is_canonical(key) else _PREFIX
        watched.cached = cached

    def _slots(self, watched: _Watched, blocks: slice) -> Codes:
        """Kinds of the slots of some of a request's blocks [blocks, slots of a block]."""
        planned, computed = watched.planned, watched.computed
        begin, end = blocks.start * self._size, blocks.stop * self._size
        prompt = max(begin, min(computed, len(planned), end))
        codes: Codes = np.full(end - begin, _PAD, dtype=np.uint8)
        codes[: computed - begin] = _DECODE
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
        """Referenced blocks that belong to no running request."""
        linker = getattr(self._scheduler, "linker", None)
        yield self._uniform(linker.held() if linker else (), _HELD)
        # A step that still runs may write into blocks of a request that has ended meanwhile
        # (vllm/v1/core/sched/scheduler.py, _free_request_blocks); nothing in them is of use.
        for _, blocks in self._scheduler.deferred_frees:
            yield self._uniform(blocks, _PAD)

    def _uniform(self, blocks: Sequence[Any], code: int) -> tuple[Ids, Codes]:
        ids = np.array([block.block_id for block in blocks], dtype=np.int64)
        return ids, np.full((len(ids), self._size), code, dtype=np.uint8)

    def _check(self, used: int) -> None:
        expected = self._pool.num_gpu_blocks - 1 - self._pool.get_num_free_blocks()
        if used != expected:
            raise EngineError(
                f"the ledger sees {used} referenced blocks, vLLM's pool counts {expected}"
            )


def _followed_by(call: Callable[..., Any], action: Callable[[], None]) -> Callable[..., Any]:
    """`call`, and `action` after it."""

    def both(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        action()
        return result

    return both
