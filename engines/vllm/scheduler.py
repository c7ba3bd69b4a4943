"""vLLM's scheduler with a linker: the official `scheduler_cls` extension point.

Upstream: vllm/v1/core/sched/scheduler.py of vLLM 0.32.0. Five methods are extended, none replaced.
"""

from collections.abc import Iterable
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from picbench.engines.vllm.admission import Limits
from picbench.engines.vllm.linker import Linker
from picbench.engines.vllm.plugin import check_registered
from picbench.engines.vllm.pool import Pool
from picbench.engines.vllm.settings import CPU_WORKER, PicSettings
from picbench.engines.vllm.support import (
    check_config,
    check_kv_groups,
    check_signature,
    check_version,
)
from picbench.errors import ConfigError


class PicScheduler(Scheduler):
    """Schedules plans; `linker` holds everything that is picbench's."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        settings = _checked(vllm_config)
        check_kv_groups(len(kv_cache_config.kv_cache_groups))
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        pool = Pool(self.kv_cache_manager.block_pool)
        self.linker = Linker(settings, Limits.of(vllm_config), pool, self._queue_ahead)

    def add_request(self, request: Request) -> None:
        """Plan a request on arrival."""
        if request.request_id not in self.requests:
            self.linker.admit(request)
        super().add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Start compiles, schedule, and tell the linker who was scheduled."""
        self.linker.prepare(self.waiting)
        output = super().schedule(throttle_prefills)
        fresh = [r.req_id for r in output.scheduled_new_reqs]
        for request_id in (*fresh, *output.scheduled_cached_reqs.resumed_req_ids):
            request = self.requests[request_id]
            hit = request.num_computed_tokens - output.num_scheduled_tokens[request_id]
            self.linker.place(request, hit)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Keep the outputs of compile requests inside the engine."""
        internal = {
            request_id
            for request_id in scheduler_output.num_scheduled_tokens
            if request_id in self.requests and self.linker.is_compile(self.requests[request_id])
        }
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for client in outputs.values():
            client.outputs = [o for o in client.outputs if o.request_id not in internal]
        return outputs

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        """Abort also the compiles that nobody waits for any more."""
        finished = super().finish_requests(request_ids, finished_status)
        if orphans := self.linker.orphans():
            super().finish_requests(orphans, RequestStatus.FINISHED_ABORTED)
        return finished

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        return super()._handle_blocked_waiting_request(request) and self.linker.ready(request)

    def _get_local_prefix_cache_hit(self, request: Request) -> tuple[KVCacheBlocks, int, int, bool]:
        hit = super()._get_local_prefix_cache_hit(request)
        self.linker.verify(request, hit[1])
        return hit

    def _free_request(
        self, request: Request, delay_free_blocks: bool = False
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        self.linker.forget(request)
        return super()._free_request(request, delay_free_blocks)

    def _queue_ahead(self, request: Request, parent: Request) -> None:
        """Put a compile right ahead of a waiting request, wherever it stands now."""
        if request.request_id not in self.requests:
            super().add_request(request)
        if request.status == RequestStatus.RUNNING:
            return
        queue = self.waiting
        queue.remove_request(request)
        queue.insert(queue.index(parent), request)  # type: ignore[attr-defined]


def _checked(vllm_config: Any) -> PicSettings:
    check_version()
    check_registered()
    for name, parameters in _UPSTREAM.items():
        check_signature(getattr(Scheduler, name), parameters)
    settings = PicSettings.read(vllm_config.additional_config)
    if settings is None:
        raise ConfigError("the scheduler is picbench's, but additional_config has no 'pic'")
    check_config(vllm_config)
    if vllm_config.parallel_config.worker_cls != CPU_WORKER:
        raise ConfigError(
            "the scheduler is picbench's, but the workers are not",
            hint=f"worker_cls={CPU_WORKER}",
        )
    return settings


_UPSTREAM = {
    "add_request": ("self", "request"),
    "schedule": ("self", "throttle_prefills"),
    "update_from_output": ("self", "scheduler_output", "model_runner_output"),
    "finish_requests": ("self", "request_ids", "finished_status"),
    "_handle_blocked_waiting_request": ("self", "request"),
    "_get_local_prefix_cache_hit": ("self", "request"),
    "_free_request": ("self", "request", "delay_free_blocks"),
}
