"""The scheduler of GPU engines: it also sends by how much keys are turned."""

import copy
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import Request

from picbench.engines.vllm.scheduler.scheduler import PicScheduler
from picbench.engines.vllm.worker.slot_map import TURNS, turns


class PicCudaScheduler(PicScheduler):
    """Schedules plans for workers whose chunk keys rest rotated."""

    def add_request(self, request: Request) -> None:
        """Plan a request on arrival."""
        super().add_request(request)
        plan = self.linker.plan_of(request.request_id)
        if plan is not None and (turned := turns(plan)):
            params: Any = copy.copy(request.sampling_params)
            params.extra_args = {**params.extra_args, TURNS: turned}
            request.sampling_params = params


class PicAsyncScheduler(PicCudaScheduler, AsyncScheduler):
    """The same, one step ahead of the GPU."""
