"""vLLM's scheduler with a linker: the official `scheduler_cls` extension point.

Upstream: vllm/v1/core/sched/scheduler.py of vLLM 0.32.0. Its methods are extended, none is
replaced.
"""

from collections.abc import Iterable
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from picbench.engines.chunk_cache.chunk_store import ChunkStore
from picbench.engines.vllm.compat import (
    check_config,
    check_kv_groups,
    check_signature,
    check_version,
)
from picbench.engines.vllm.frontend.limits import Limits
from picbench.engines.vllm.frontend.plugin import check_registered
from picbench.engines.vllm.scheduler.chunk_jobs import ChunkJobs
from picbench.engines.vllm.scheduler.evictions import ChunkEvictions, listen
from picbench.engines.vllm.scheduler.linker import Linker
from picbench.engines.vllm.scheduler.pool import Pool
from picbench.engines.vllm.settings import REJECTED, WORKERS, PicSettings
from picbench.engines.vllm.transfer.connector import PicConnector
from picbench.errors import ConfigError


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
        self.linker = Linker(settings, Limits.of(vllm_config), pool, self.jobs)
        self._pool = pool
        self._rejects = settings.on_pressure == "reject"
        self._rejected: list[Request] = []
        listen(self.kv_cache_manager.block_pool, ChunkEvictions(self.chunk_store, pool))
        assert isinstance(self.connector, PicConnector)
        self.connector.set_planner(self.linker, self.chunk_store)

    def add_request(self, request: Request) -> None:
        """Plan a request on arrival."""
        new = request.request_id not in self.requests
        if new:
            self.linker.on_arrival(request)
        super().add_request(request)
        if new and self._rejects and self._short_of_blocks():
            self._rejected.append(request)
            super().finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Request chunks, schedule, and tell the linker what was scheduled."""
        self.linker.before_schedule(self.waiting)
        output = super().schedule(throttle_prefills)
        fresh = [r.req_id for r in output.scheduled_new_reqs]
        for request_id in (*fresh, *output.scheduled_cached_reqs.resumed_req_ids):
            request = self.requests[request_id]
            hit = request.num_computed_tokens - output.num_scheduled_tokens[request_id]
            self.linker.on_scheduled(request, hit)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Drop the outputs of the linker's own requests, and finish its fetches."""
        internal = {
            request_id
            for request_id in scheduler_output.num_scheduled_tokens
            if request_id in self.requests and self.linker.is_own(self.requests[request_id])
        }
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for client in outputs.values():
            client.outputs = [o for o in client.outputs if o.request_id not in internal]
        self._finish_fetches()
        self._answer_rejected(outputs)
        return outputs

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        """Finish also those of the linker's own requests that no request waits for any more."""
        finished = super().finish_requests(request_ids, finished_status)
        if orphans := self.linker.orphans():
            super().finish_requests(orphans, RequestStatus.FINISHED_ABORTED)
        return finished

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        unblocked = super()._handle_blocked_waiting_request(request)
        return unblocked and self.linker.can_schedule(request)

    def _get_local_prefix_cache_hit(self, request: Request) -> tuple[KVCacheBlocks, int, int, bool]:
        hit = super()._get_local_prefix_cache_hit(request)
        self.linker.check_hits(request, hit[1])
        return hit

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self.linker.on_preempted(request, self._block_ids(request))
        super()._preempt_request(request, *args, **kwargs)

    def _free_request(
        self, request: Request, delay_free_blocks: bool = False
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        success = request.status != RequestStatus.FINISHED_ABORTED
        self.linker.on_finished(request, self._block_ids(request), success=success)
        return super()._free_request(request, delay_free_blocks)

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

    def _answer_rejected(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        for request in self._rejected:
            client = outputs.setdefault(request.client_index, EngineCoreOutputs())
            answer = EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=FinishReason.ERROR,
                stop_reason=REJECTED,
            )
            client.outputs = [*client.outputs, answer]
        self._rejected.clear()

    def _queue_ahead(self, request: Request, parent: Request) -> None:
        """Queue a request of the linker's right ahead of a waiting one, moving it if need be."""
        if request.request_id not in self.requests:
            super().add_request(request)
        if request.status in (RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KVS):
            return
        queue = self.waiting
        queue.remove_request(request)
        queue.insert(queue.index(parent), request)  # type: ignore[attr-defined]


class PicAsyncScheduler(PicScheduler, AsyncScheduler):
    """The same, one step ahead of the GPU."""


def _checked(vllm_config: Any) -> PicSettings:
    check_version()
    check_registered()
    for name, parameters in _UPSTREAM.items():
        check_signature(getattr(Scheduler, name), parameters)
    settings = PicSettings.read(vllm_config.additional_config)
    if settings is None:
        raise ConfigError("the scheduler is picbench's, but additional_config has no 'pic'")
    check_config(vllm_config)
    if vllm_config.parallel_config.worker_cls not in WORKERS:
        raise ConfigError(
            "the scheduler is picbench's, but the workers are not",
            hint=f"worker_cls={' or '.join(WORKERS)}",
        )
    return settings


_UPSTREAM = {
    "add_request": ("self", "request"),
    "schedule": ("self", "throttle_prefills"),
    "update_from_output": ("self", "scheduler_output", "model_runner_output"),
    "finish_requests": ("self", "request_ids", "finished_status"),
    "_preempt_request": ("self", "request", "timestamp", "drop_stale_output"),
    "_handle_blocked_waiting_request": ("self", "request"),
    "_get_local_prefix_cache_hit": ("self", "request"),
    "_free_request": ("self", "request", "delay_free_blocks"),
}
