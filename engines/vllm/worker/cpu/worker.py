"""vLLM's CPU worker with picbench's model runner: the official `worker_cls` extension point."""

import hashlib
import os

import torch
from vllm.model_executor.layers.linear import LinearBase
from vllm.v1.worker.cpu_worker import CPUWorker

from picbench.engines.vllm.compat import check_config, check_version
from picbench.engines.vllm.settings import ASYNC_SCHEDULER, SCHEDULER, PicSettings
from picbench.engines.vllm.transfer.worker_mixin import ConnectorWorkerMixin
from picbench.engines.vllm.worker.cpu.runner import PicModelRunner
from picbench.errors import ConfigError
from picbench.kernels.first_calls import settle_first_calls


class PicCPUWorker(ConnectorWorkerMixin, CPUWorker):
    """Runs planned requests; refuses to start without picbench's scheduler."""

    def init_device(self) -> None:
        """Set up the device, with picbench's model runner."""
        check_version()
        scheduler = self.vllm_config.scheduler_config.scheduler_cls
        settings = PicSettings.read(self.vllm_config.additional_config)
        if settings is None or scheduler != SCHEDULER:
            ahead = settings is not None and scheduler == ASYNC_SCHEDULER
            raise ConfigError(
                "on a CPU no step is scheduled ahead of the one before it"
                if ahead
                else "the workers are picbench's, but the scheduler is not",
                hint=f"scheduler_cls={SCHEDULER} and additional_config with 'pic'",
            )
        check_config(self.vllm_config)
        # The model's table of RoPE is made later, with many threads.
        settle_first_calls()
        super().init_device()  # type: ignore[no-untyped-call]
        if self.use_v2_model_runner:
            raise ConfigError(
                "model runner V2 is not supported on CPU", hint="VLLM_USE_V2_MODEL_RUNNER=0"
            )
        self.model_runner = PicModelRunner(self.vllm_config, torch.device("cpu"))

    def namespace(self) -> bytes:
        """As on GPUs; like no other where oneDNN took INT8 weights, which cannot be read any more.

        Upstream: `process_weights_for_onednn` of `CPUInt8ScaledMMLinearKernel` in vLLM 0.32.0.
        """
        layers = (m for m in self.get_model().modules() if isinstance(m, LinearBase))
        taken = any(layer._parameters.get("weight", layer) is None for layer in layers)
        found = super().namespace()
        return hashlib.sha256(found + os.urandom(32)).digest() if taken else found

    def self_check(self) -> list[tuple[str, float, float]]:
        """Errors of rotations and attention: name, relative error, largest that passes."""
        assert isinstance(self.model_runner, PicModelRunner)
        return self.model_runner.self_check()

    def workspace_bytes(self) -> int:
        """Memory that attention holds beside the KV cache."""
        assert isinstance(self.model_runner, PicModelRunner)
        return self.model_runner.workspace_bytes
