"""vLLM's scheduler with a linker: the official `scheduler_cls` extension point.

A fault in a hook of the linker, or in a worker's transfers, ends one request: it is answered with
vLLM's finish reason "error" and one line as the stop reason.

Upstream: vllm/v1/core/sched/scheduler.py of vLLM 0.32.0. Its methods are extended, none is
replaced, but that the cached blocks of planned requests are looked up and counted by
`prompt_hits.py`, that `chunk_tails.py` says which blocks are full, and that the cache of running
requests is dropped also where upstream refuses to (`reset_prefix_cache`, scheduler.py:2869).
"""

import time
from collections.abc import Iterable
from functools import partial
from math import inf, nextafter
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from picbench.engines.chunk_cache.chunk_store import ChunkStore
from picbench.engines.chunk_cache.tiers.notation import parse_tiers
from picbench.engines.vllm.compat import (
    check_completed,
    check_config,
    check_kv_groups,
    check_signature,
    check_version,
    read_settings,
)
from picbench.engines.vllm.faults import Faults
from picbench.engines.vllm.frontend.engine_core import defer_hashing, plan_on_receipt
from picbench.engines.vllm.frontend.limits import Limits
from picbench.engines.vllm.scheduler.cache_manager import ChunkEvents, ChunkTails, PromptHits
from picbench.engines.vllm.scheduler.chooser import Chooser
from picbench.engines.vllm.scheduler.chunk_jobs import ChunkJobs
from picbench.engines.vllm.scheduler.erasures import Erasures
from picbench.engines.vllm.scheduler.first_tokens import FirstTokens
from picbench.engines.vllm.scheduler.isolation import IsolatedLinker
from picbench.engines.vllm.scheduler.linker import Linker
from picbench.engines.vllm.scheduler.machine_costs import MachineCosts, ModelShape
from picbench.engines.vllm.scheduler.planner import RequestPlanner
from picbench.engines.vllm.scheduler.pool import ChunkEvictions, Pool, listen
from picbench.engines.vllm.scheduler.usage import UsageReports
from picbench.engines.vllm.settings import REJECTED, WORKERS, PicSettings
from picbench.engines.vllm.transfer.connector import PicConnector
from picbench.errors import ConfigError, EngineError

#: How a request of the linker's own ends whose chunk is computed or loaded.
_SUCCESS = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


class PicScheduler(Scheduler):
    """Schedules planned requests beside plain ones; `linker` does what is picbench's."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        settings = _checked(vllm_config)
        check_kv_groups(len(kv_cache_config.kv_cache_groups))
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        pool = Pool(self.kv_cache_manager.block_pool)
        tiers, shared = bool(settings.tiers), settings.shares_tiers
        self.chunk_store = ChunkStore(pool, tiers=tiers, shared_tiers=shared)
        self.jobs = ChunkJobs(self.chunk_store, self._queue_ahead)
        self._faults = Faults(lambda request_id: self.linker.concerned(request_id))
        costs = _machine_costs(vllm_config)
        self.chooser = Chooser(costs, self.chunk_store, pool, self.get_num_unfinished_requests)
        self._planner = RequestPlanner(settings, Limits.of(vllm_config), self.chooser, pool)
        self.linker = Linker(settings, self._planner, pool, self.jobs, self._faults)
        self._hooks = IsolatedLinker(self.linker, self._faults)
        self._first_tokens = FirstTokens(costs, self.linker, time.time)
        self._usage = UsageReports(self.linker, self.chunk_store, always=settings.usage)
        specs, alive = parse_tiers(settings.tiers or ""), lambda: self.requests.keys()
        self.erasures = Erasures(self.chunk_store, pool, self.linker, alive, specs)
        self._pool = pool
        self._hits = PromptHits(self.kv_cache_manager, pool, self.block_size)
        coordinator = self.kv_cache_manager.coordinator
        self._blocks_of = coordinator.single_type_managers[0].req_to_blocks
        self._tails = ChunkTails(coordinator, self.jobs, self.block_size)
        coordinator.cache_blocks = self._tails.cache_blocks  # type: ignore[method-assign]
        estimate = self._hits.estimate_cached_tokens
        self.kv_cache_manager.estimate_cached_tokens = estimate  # type: ignore[method-assign]
        self._record_stock_hits = self.kv_cache_manager.record_prefix_cache_stats
        record = self._record_hits
        self.kv_cache_manager.record_prefix_cache_stats = record  # type: ignore[method-assign]
        self._rejects = settings.on_pressure == "reject"
        # What clients are told of requests that were ended.
        self._answers: list[tuple[int, EngineCoreOutput]] = []
        self._dropped_loads = set[str]()
        evictions = ChunkEvictions(self.chunk_store, pool, self._faults)
        listen(self.kv_cache_manager.block_pool, evictions)
        if self.enable_kv_cache_events:
            ChunkEvents(self.kv_cache_manager.block_pool, self.linker, self._faults)
        assert isinstance(self.connector, PicConnector)  # `check_config`
        self.connector.set_planner(self._hooks, self.chunk_store)
        self.connector.report(lambda: self._usage.values(pool))
        named, size = ", ".join(spec.text for spec in specs) or "none", pool.usable
        what = f"algorithm {settings.algorithm}, tiers {named}, {size} KV blocks of 16 tokens"
        self.connector.about = what

    def plan_early(self, request: Request) -> None:
        """Plan a request that was received, in whatever thread that is (`early_planning.py`)."""
        self._planner.plan_early(request)

    def add_request(self, request: Request) -> None:
        """Plan a request on arrival."""
        new = request.request_id not in self.requests
        if new:
            self._note_reasoning(request)
            self._hooks.on_arrival(request)
            note = partial(self.erasures.note, request)
            self._faults.succeeds("note documents", request.request_id, note)
            alone = self._planner.chooses and not self.requests
            self._first_tokens.arrive(request, alone=alone)
        super().add_request(request)
        short = new and self._rejects and not self._hooks.has_failed(request)
        if short and self._faults.attempt("count", None, self._short_of_blocks, False):
            self._end(request, REJECTED)
        self._end_failed()

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Request chunks, schedule, and tell the linker what was scheduled."""
        self._faults.succeeds("erase documents", None, self.erasures.before_schedule)
        self._hooks.before_schedule(self.waiting, self._needed_first())
        self._end_failed()
        output = super().schedule(throttle_prefills)
        begun = [r.req_id for r in output.scheduled_new_reqs]
        new = {name for name in begun if self.jobs.find(name) is None}
        begun += output.scheduled_cached_reqs.resumed_req_ids
        # Chunks before the requests that they are compiled for, which are counted then.
        for request_id in sorted(begun, key=lambda name: self.jobs.find(name) is None):
            request = self.requests[request_id]
            hit = request.num_computed_tokens - output.num_scheduled_tokens[request_id]
            self._hooks.on_scheduled(request, hit)
            if self._is_planned(request) and not self.linker.is_own(request):
                counts = self.linker.tokens_of(request.request_id)
                self._hits.count(request, counts.loaded if counts else {})
            if request_id in new:
                self._first_tokens.begin(request, hit)
                count = partial(self._usage.on_scheduled, request, hit)
                self._faults.succeeds("report a prompt's usage", None, count)
        self._first_tokens.note(output)
        self._tails.zero_new(output, self._block_ids)
        # Nothing is going to be received for these: their blocks can be freed when they end.
        self.finished_recving_kv_req_ids |= self._hooks.unloaded & self._receiving()
        self._hooks.unloaded.clear()
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Drop the outputs of the linker's own requests, finish its fetches, and answer faults."""
        self._first_tokens.end(scheduler_output)
        self._end_failed()
        self._fail_dropped(model_runner_output.kv_connector_output)
        internal = {
            request_id
            for request_id in scheduler_output.num_scheduled_tokens
            if request_id in self.requests and self.linker.is_own(self.requests[request_id])
        }
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._end_failed()
        self._finish_fetches()
        dropped = internal | {answer.request_id for _, answer in self._answers}
        for client in outputs.values():
            client.outputs = [o for o in client.outputs if o.request_id not in dropped]
        for number, answer in self._answers:
            client = outputs.setdefault(number, EngineCoreOutputs())
            client.outputs = [*client.outputs, answer]
        self._answers.clear()
        self._usage.attach(outputs.values())
        return outputs

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        """Finish also those of the linker's own requests that no request waits for any more."""
        finished = super().finish_requests(request_ids, finished_status)
        self._usage.drop(finished)
        if orphans := self._hooks.orphans():
            super().finish_requests(orphans, RequestStatus.FINISHED_ABORTED)
        return finished

    def shutdown(self) -> None:
        """End also the thread that waits for redis."""
        if self.erasures.log:
            self.erasures.log.close()
        super().shutdown()

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Drop the cache; what waiting requests reference until the next step is no hindrance.

        Upstream preempts what runs, and raises if blocks are in use even then: while tiers load
        chunks, or a step computes that was scheduled ahead. Here such blocks lose their keys, and
        are freed when nothing writes to them any more; the loads count as failed then.

        Raises EngineError, and preempts nothing, if chunks are pinned.
        """
        self.linker.release_held()
        if not reset_running_requests:
            return super().reset_prefix_cache(reset_connector=reset_connector)
        if self.chunk_store.pinned:
            raise EngineError(
                "the cache cannot be dropped while chunks are pinned",
                hint="unpin them first: `engine.cache.unpin`",
            )
        # Last first, so that they are queued in their order.
        while self.running:
            request = self.running.pop()
            self._preempt_request(request, time.monotonic(), drop_stale_output=True)
        self._drop_loads()
        if self._pool.available < self._pool.usable:
            self._pool.forget_all()
            stats = self.kv_cache_manager.prefix_cache_stats
            if stats is not None:
                stats.reset = True
            self.prev_step_scheduled_req_ids.clear()
            return not reset_connector or self.reset_connector_cache()
        return super().reset_prefix_cache(True, reset_connector)

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        """Count users' requests alone, and hits of tiers as `PromptHits.count` has them.

        While the linker's own requests bring its chunks, the user's request counts as waiting.
        """
        if self.connector_prefix_cache_stats is not None:
            self._hits.external.reset = self.connector_prefix_cache_stats.reset
            self.connector_prefix_cache_stats = self._hits.external
            self._hits.external = PrefixCacheStats()
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            for request in self.jobs.requests():
                if request.status == RequestStatus.RUNNING:
                    stats.num_running_reqs -= 1
                elif request in self.deferred_waiting:
                    stats.num_skipped_waiting_reqs -= 1
                else:
                    stats.num_waiting_reqs -= 1
        return stats

    def _record_hits(self, request: Request, num_hits: int) -> None:
        """Count the hits of a plain request; those of planned ones are counted in `schedule`.

        Upstream counts slots, with pads and linked copies, and would count a chunk twice: when a
        request of the linker's brings it into the pool, and when the user's request finds it there.
        """
        if not self._is_planned(request):
            self._record_stock_hits(request, num_hits)

    def _is_planned(self, request: Request) -> bool:
        return self.linker.plan_of(request.request_id) is not None

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        if self._hooks.has_failed(request):
            return False
        unblocked = super()._handle_blocked_waiting_request(request)
        if unblocked and not self._holds_kv_blocks(request):
            # A load that failed: its blocks are free again, but vLLM goes on to keep as many from
            # other loads as the request needs (`_update_waiting_for_remote_kv`). Loads that fail
            # together would keep so many that none of them could be tried again.
            self._inflight_prefills.discard(request)
        return unblocked and self._hooks.can_schedule(request)

    def _get_local_prefix_cache_hit(
        self, request: Request, *most: int | None
    ) -> tuple[KVCacheBlocks, int, int, bool]:
        # No hit is bounded: `check_config` refuses what bounds them (`aux_output_config`).
        planned = self._is_planned(request)
        find = self._hits.find if planned else super()._get_local_prefix_cache_hit
        hit = find(request)
        self._hooks.check_hits(request, hit[1])
        return hit

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self._hooks.on_preempted(request, self._block_ids(request))
        super()._preempt_request(request, *args, **kwargs)

    def _free_request(
        self, request: Request, delay_free_blocks: bool = False
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        success = request.status in _SUCCESS
        self._hooks.on_finished(request, self._block_ids(request), success=success)
        return super()._free_request(request, delay_free_blocks)

    def _note_reasoning(self, request: Request) -> None:
        """Note whether the model has reasoned already, by the prompt as it was sent.

        Upstream (`_get_constraint_bounds` in vllm/v1/structured_output/__init__.py) looks for the
        last mark of reasoning in the prompt, which may be another one in compute order.
        """
        asked = request.structured_output_request
        if asked is None or asked.reasoning_ended is not None:
            return

        def read() -> None:
            reasoner = self.structured_output_manager._get_reasoner(request)
            if reasoner is not None:
                asked.reasoning_ended = reasoner.is_reasoning_end(request.prompt_token_ids or [])

        self._faults.succeeds("read a prompt's reasoning", request.request_id, read)

    def _block_ids(self, request: Request) -> tuple[int, ...]:
        return tuple(self.kv_cache_manager.get_block_ids(request.request_id)[0])

    def _finish_fetches(self) -> None:
        """Finish fetches whose loads have ended: they compute nothing."""
        for job in self.jobs.fetches():
            request = job.request
            if request.request_id not in self.finished_recving_kv_req_ids:
                continue
            status = RequestStatus.FINISHED_ABORTED
            if request.request_id not in self.failed_recving_kv_req_ids:
                self.kv_cache_manager.cache_blocks(request, request.num_computed_tokens)
                status = RequestStatus.FINISHED_STOPPED
            super().finish_requests(request.request_id, status)

    def _short_of_blocks(self) -> bool:
        """Whether the waiting requests need more blocks than are available."""
        waiting = [r for r in self.waiting if not self.linker.is_own(r)]
        return sum(map(self.linker.blocks_needed, waiting)) > self._pool.available

    def _drop_loads(self) -> None:
        """Have what tiers loaded or are loading computed anew, as if these loads had failed."""
        receiving = self._receiving() - self.finished_recving_kv_req_ids
        self._dropped_loads |= receiving
        for request in self.kv_holding_waiting:
            if request.request_id in receiving:
                continue
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                self.failed_recving_kv_req_ids.add(request.request_id)
            self._inflight_prefills.discard(request)
            self._free_request_blocks(request)
            request.num_computed_tokens = 0

    def _fail_dropped(self, results: KVConnectorOutput | None) -> None:
        """Let loads that were to be dropped have failed, now that nothing writes any more."""
        if results is not None and results.finished_recving:
            ended = self._dropped_loads & results.finished_recving
            self._dropped_loads -= ended
            results.failed_recving |= ended

    def _needed_first(self) -> int:
        """Blocks that requests still need for their tokens so far and that vLLM schedules first.

        Nothing is scheduled after those whose loads have ended as long as they do not get their
        blocks. Those that run would be preempted, start over, and lack the same blocks again.
        """
        if not self.waiting:
            return 0
        receiving = self._receiving() - self.finished_recving_kv_req_ids
        loaded = (r for r in self.kv_holding_waiting if r.request_id not in receiving)
        return sum(map(self._lacks, self.running)) + sum(
            map(self._request_remaining_blocks, loaded)
        )

    def _lacks(self, request: Request) -> int:
        """Blocks that a running request needs for its tokens, also those that no step has given.

        As `_request_remaining_blocks`, in a fifth of the time (70 us for 256 running requests a
        step).
        """
        tokens = request.num_tokens + request.num_output_placeholders
        return max(0, -(-tokens // self.block_size) - len(self._blocks_of[request.request_id]))

    def _receiving(self) -> set[str]:
        return {
            request.request_id
            for request in self.kv_holding_waiting
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        }

    def _end_failed(self) -> None:
        """End the requests that faults are to end; those that they end with, too."""
        while failed := self._faults.take():
            for request_id, reason in failed.items():
                request = self.requests.get(request_id)
                if request is not None and not request.is_finished():
                    self.linker.reconcile(request_id)
                    self._end(request, reason)
                elif request_id in self._hooks.ended:
                    self._answer(self._hooks.ended.pop(request_id), request_id, reason)

    def _end(self, request: Request, reason: str) -> None:
        """End a request with an error; one of the linker's own, without an answer."""
        if not self.linker.is_own(request):
            self._answer(request.client_index, request.request_id, reason)
        self.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)

    def _answer(self, client: int, request_id: str, reason: str) -> None:
        """Have a client told why its request was ended: the reason, one line."""
        why = "pressure" if reason == REJECTED else "fault"
        self._usage.totals[f"refused_requests|{why}"] += 1
        output = EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR)
        output.stop_reason = reason
        self._answers.append((client, output))

    def _queue_ahead(self, request: Request, parent: Request | None) -> None:
        """Queue the linker's own request ahead of a waiting one; without `parent` as any other."""
        new = request.request_id not in self.requests
        if new:
            if parent is not None:
                _make_urgent(request, parent)
            super().add_request(request)
        if parent is None or request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            return
        try:
            self._move_ahead(request, parent, new=new)
        except Exception:
            super().finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
            raise

    def _move_ahead(self, request: Request, parent: Request, *, new: bool) -> None:
        """Move a request ahead of a waiting one; to search the whole queue for it takes a while.

        A new one was queued last, or where it belongs if the queue is sorted by priority.
        """
        queue, waits = self.waiting, request.status != RequestStatus.RUNNING
        if isinstance(queue, FCFSRequestQueue):
            if new:
                queue.pop()
            elif waits:
                queue.remove_request(request)
            if waits:
                queue.insert(queue.index(parent), request)
        elif not new:
            if waits:
                queue.remove_request(request)
            # Also one that runs: what is preempted depends on it.
            _make_urgent(request, parent)
            if waits:
                queue.add_request(request)


def _make_urgent(request: Request, parent: Request) -> None:
    """Set what a queue by priority is sorted by, and what is preempted there: before `parent`."""
    request.priority = parent.priority
    request.arrival_time = nextafter(parent.arrival_time, -inf)


class PicAsyncScheduler(PicScheduler, AsyncScheduler):
    """The same, one step ahead of the GPU."""


def _machine_costs(vllm_config: Any) -> MachineCosts:
    """What the costs of this engine's machine are taken to be."""
    graphs = vllm_config.compilation_config.cudagraph_capture_sizes
    ranks = vllm_config.parallel_config.tensor_parallel_size
    shape = ModelShape.of(vllm_config.model_config.hf_text_config.to_dict(), ranks)
    return MachineCosts(vllm_config.device_config.device_type, shape, max(graphs or (), default=0))


def _checked(vllm_config: Any) -> PicSettings:
    check_version()
    check_completed(vllm_config)
    # Engine cores hash and plan what they receive from here on.
    defer_hashing()
    plan_on_receipt()
    for name, parameters in _UPSTREAM.items():
        check_signature(getattr(Scheduler, name), *parameters)
    check_signature(StructuredOutputManager._get_reasoner, "self, request")
    settings = read_settings(vllm_config)
    if settings is None:
        raise ConfigError("the scheduler is picbench's, but additional_config has no 'pic'")
    check_config(vllm_config)
    if vllm_config.parallel_config.worker_cls not in WORKERS:
        raise ConfigError(
            "the scheduler is picbench's, but the workers are not",
            hint=f"worker_cls={' or '.join(WORKERS)}",
        )
    return settings.on(vllm_config.device_config.device_type)


#: Parameters of methods, where releases differ those of each of `RELEASES`.
_UPSTREAM = {
    "add_request": ("self, request",),
    "schedule": ("self, throttle_prefills",),
    "update_from_output": ("self, scheduler_output, model_runner_output",),
    "finish_requests": ("self, request_ids, finished_status",),
    "reset_prefix_cache": ("self, reset_running_requests, reset_connector",),
    "_preempt_request": ("self, request, timestamp, drop_stale_output",),
    "_handle_blocked_waiting_request": ("self, request",),
    "_get_local_prefix_cache_hit": ("self, request", "self, request, max_cache_hit_length"),
    "make_stats": (
        "self, spec_decoding_stats, kv_connector_stats, cudagraph_stats, perf_stats, "
        "ec_connector_stats",
    ),
    "_free_request": ("self, request, delay_free_blocks",),
    "_free_request_blocks": ("self, request",),
}
