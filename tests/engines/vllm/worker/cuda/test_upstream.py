"""What the CUDA worker needs of vLLM's GPU runners, which can be imported without a GPU."""

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from picbench.engines.vllm.compat import check_signature
from picbench.engines.vllm.scheduler.scheduler import PicAsyncScheduler, PicScheduler
from picbench.engines.vllm.transfer.worker_mixin import ConnectorWorkerMixin
from picbench.engines.vllm.worker.cpu.worker import PicCPUWorker
from picbench.engines.vllm.worker.cuda.runner import UPSTREAM
from picbench.engines.vllm.worker.cuda.worker import PicGPUWorker


def test_methods_that_are_extended_are_those_of_the_pinned_release() -> None:
    for owner, name, parameters in UPSTREAM:
        check_signature(getattr(owner, name), parameters)
    check_signature(Worker._make_model_runner, "self")
    check_signature(GPUModelRunner._prepare_inputs, "self, scheduler_output, num_scheduled_tokens")
    check_signature(
        GPUModelRunner.initialize_kv_cache,
        "self, kv_cache_config, is_profiling, kv_cache_allocation_context",
    )


def test_every_step_of_a_worker_runs_with_its_own_connector() -> None:
    for name in ("initialize_from_config", "execute_model", "sample_tokens", "shutdown"):
        assert getattr(PicGPUWorker, name) is not getattr(Worker, name)


def test_both_workers_treat_their_connector_alike() -> None:
    shared = [name for name in vars(ConnectorWorkerMixin) if not name.startswith("__")]
    assert "tier_client" in shared
    for name in set(shared) - {"namespace"}:
        assert getattr(PicGPUWorker, name) is getattr(PicCPUWorker, name)


def test_plans_come_before_scheduling_ahead() -> None:
    order = PicAsyncScheduler.__mro__
    assert order.index(PicScheduler) < order.index(AsyncScheduler)
