"""What the GPU adapter needs of vLLM's GPU runners, which import without a GPU."""

import inspect
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from picbench.engines.vllm.agent import OwnConnector
from picbench.engines.vllm.cuda import runner as runner_v2
from picbench.engines.vllm.cuda.runner import UPSTREAM, PicModelRunner
from picbench.engines.vllm.cuda.runner_v1 import PicModelRunnerV1
from picbench.engines.vllm.cuda.scheduler import PicAsyncScheduler
from picbench.engines.vllm.cuda.state import PicModelState
from picbench.engines.vllm.cuda.worker import PicGPUWorker
from picbench.engines.vllm.scheduler import PicScheduler
from picbench.engines.vllm.support import check_signature
from picbench.engines.vllm.worker import PicCPUWorker


def test_methods_that_are_extended_are_those_of_the_pinned_release() -> None:
    for owner, name, parameters in UPSTREAM:
        check_signature(getattr(owner, name), parameters)
    check_signature(Worker._make_model_runner, ("self",))
    check_signature(
        GPUModelRunner._prepare_inputs, ("self", "scheduler_output", "num_scheduled_tokens")
    )
    check_signature(
        GPUModelRunner.initialize_kv_cache,
        ("self", "kv_cache_config", "is_profiling", "kv_cache_allocation_context"),
    )


@pytest.mark.parametrize("runner", [PicModelRunner, PicModelRunnerV1])
def test_kernels_are_compiled_for_the_cache_as_it_lies_in_memory(
    monkeypatch: pytest.MonkeyPatch, runner: Any
) -> None:
    warmed: list[Any] = []
    upstream = runner.__mro__[1]
    assert "self.kv_caches" in inspect.getsource(sys.modules[upstream.__module__])

    def allocate(self: Any, kv_cache_config: Any, is_profiling: bool, context: Any) -> None:
        assert context == "context"
        self.kv_caches = ["of layer 0", "of layer 1"]
        self.cudagraph_manager = SimpleNamespace(cudagraph_mode=None)

    monkeypatch.setattr(upstream, "initialize_kv_cache", allocate)
    monkeypatch.setattr(runner_v2, "PlannedGraphs", lambda *_: None)
    kernels = SimpleNamespace(warm_up=warmed.append)
    made = object.__new__(runner)
    made.vllm_config = made.device = made.decode_query_len = None
    if runner is PicModelRunner:
        made.model_state = object.__new__(PicModelState)
        made.model_state._attention = SimpleNamespace(planner=kernels)
    else:
        made._attention = SimpleNamespace(planner=kernels)
    made.initialize_kv_cache("config", True, "context")
    assert warmed == []
    made.initialize_kv_cache("config", False, "context")
    assert warmed == ["of layer 0"]


def test_every_step_of_a_worker_runs_with_its_own_connector() -> None:
    for name in ("initialize_from_config", "execute_model", "sample_tokens", "shutdown"):
        assert getattr(PicGPUWorker, name) is not getattr(Worker, name)


def test_both_workers_treat_their_connector_alike() -> None:
    shared = [name for name in vars(OwnConnector) if not name.startswith("__")]
    assert "courier" in shared
    for name in set(shared) - {"namespace"}:
        assert getattr(PicGPUWorker, name) is getattr(PicCPUWorker, name)


def test_plans_come_before_scheduling_ahead() -> None:
    order = PicAsyncScheduler.__mro__
    assert order.index(PicScheduler) < order.index(AsyncScheduler)
