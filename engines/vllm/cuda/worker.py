"""vLLM's GPU worker with picbench's model runners: the official `worker_cls` extension point.

Upstream: vllm/v1/worker/gpu_worker.py of vLLM 0.32.0.
"""

import hashlib
from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from picbench.engines.vllm.agent import Agent
from picbench.engines.vllm.identity import namespace
from picbench.engines.vllm.settings import CUDA_ASYNC_SCHEDULER, CUDA_SCHEDULER, PicSettings
from picbench.engines.vllm.support import check_signature, check_version
from picbench.errors import ConfigError


class PicGPUWorker(Worker):
    """Runs plans; refuses to start under a scheduler that does not make them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._agent = Agent()

    def init_device(self) -> None:
        """Check what this process was given before anything is loaded."""
        check_version()
        check_signature(Worker._make_model_runner, ("self",))
        scheduler = self.vllm_config.scheduler_config.scheduler_cls
        self._settings = PicSettings.read(self.vllm_config.additional_config)
        if self._settings is None or scheduler not in (CUDA_SCHEDULER, CUDA_ASYNC_SCHEDULER):
            raise ConfigError(
                "the workers are picbench's, but the scheduler is not",
                hint=f"scheduler_cls={CUDA_ASYNC_SCHEDULER} and additional_config with 'pic'",
            )
        super().init_device()

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocate the KV cache, and name what its content depends on."""
        with self._agent.at_work():
            super().initialize_from_config(kv_cache_config)
        self._agent.connector.courier.belong(self._namespace())

    def compile_or_warm_up_model(self) -> Any:
        """Compile the model and capture graphs with this worker's own connector."""
        with self._agent.at_work():
            return super().compile_or_warm_up_model()

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a step with this worker's own connector."""
        with self._agent.at_work():
            return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """End a step with this worker's own connector."""
        with self._agent.at_work():
            return super().sample_tokens(grammar_output)

    def shutdown(self) -> None:
        """Close the tiers, then the worker."""
        with self._agent.at_work():
            super().shutdown()

    def _make_model_runner(self) -> Any:
        assert self.device is not None
        if self.use_v2_model_runner:
            from picbench.engines.vllm.cuda.runner import PicModelRunner

            return PicModelRunner(self.vllm_config, self.device)
        from picbench.engines.vllm.cuda.runner_v1 import PicModelRunnerV1

        return PicModelRunnerV1(self.vllm_config, self.device)

    def _namespace(self) -> bytes:
        """What chunk KV depends on here: keys rest rotated as they were compiled, or unrotated."""
        assert self._settings is not None
        common = namespace(self.vllm_config, self.model_runner.get_model(), self.rank)
        rest = b"unrotated" if self._settings.unrotated_keys else b"chunk-local"
        return hashlib.sha256(common + b"cuda" + rest).digest()
