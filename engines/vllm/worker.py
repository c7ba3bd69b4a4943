"""vLLM's CPU worker with picbench's model runner: the official `worker_cls` extension point."""

from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from picbench.engines.vllm.agent import Agent
from picbench.engines.vllm.courier import Courier
from picbench.engines.vllm.identity import namespace
from picbench.engines.vllm.runner import PicModelRunner
from picbench.engines.vllm.settings import SCHEDULER, PicSettings
from picbench.engines.vllm.support import check_version
from picbench.errors import ConfigError


class PicCPUWorker(CPUWorker):
    """Runs plans; refuses to start under a scheduler that does not make them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._agent = Agent()

    def init_device(self) -> None:
        """Set the device up and put picbench's model runner in place."""
        check_version()
        scheduler = self.vllm_config.scheduler_config.scheduler_cls
        if PicSettings.read(self.vllm_config.additional_config) is None or scheduler != SCHEDULER:
            raise ConfigError(
                "the workers are picbench's, but the scheduler is not",
                hint=f"scheduler_cls={SCHEDULER} and additional_config with 'pic'",
            )
        super().init_device()  # type: ignore[no-untyped-call]
        if self.use_v2_model_runner:
            raise ConfigError(
                "model runner V2 is not supported on CPU", hint="VLLM_USE_V2_MODEL_RUNNER=0"
            )
        self.model_runner = PicModelRunner(self.vllm_config, torch.device("cpu"))

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocate the KV cache, and name what its content depends on."""
        with self._agent.at_work():
            super().initialize_from_config(kv_cache_config)
        model = self.model_runner.get_model()
        self.courier.belong(namespace(self.vllm_config, model, self.rank))

    @property
    def courier(self) -> Courier:
        """What moves chunk KV between this worker's pool and the tiers."""
        courier: Courier = self._agent.connector.courier
        return courier

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a step with this worker's own connector."""
        with self._agent.at_work():
            return super().execute_model(scheduler_output)

    def shutdown(self) -> None:
        """Close the tiers, then the worker."""
        with self._agent.at_work():
            super().shutdown()
