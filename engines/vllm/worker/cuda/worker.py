"""vLLM's GPU worker with picbench's model runners: the official `worker_cls` extension point.

Upstream: vllm/v1/worker/gpu_worker.py of vLLM 0.32.0.
"""

import hashlib
from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from picbench.engines.vllm.compat import check_config, check_signature, check_version
from picbench.engines.vllm.settings import ASYNC_SCHEDULER, SCHEDULER, PicSettings
from picbench.engines.vllm.transfer.worker_mixin import ConnectorWorkerMixin
from picbench.engines.vllm.worker.key_check import TOLERANCE, rotary_error
from picbench.errors import ConfigError
from picbench.kernels.first_calls import settle_first_calls


class PicGPUWorker(ConnectorWorkerMixin, Worker):
    """Runs planned requests; refuses to start without picbench's scheduler."""

    def init_device(self) -> None:
        """Check versions and settings before anything is loaded."""
        check_version()
        check_signature(Worker._make_model_runner, "self")
        scheduler = self.vllm_config.scheduler_config.scheduler_cls
        self._settings = PicSettings.read(self.vllm_config.additional_config)
        if self._settings is None or scheduler not in (SCHEDULER, ASYNC_SCHEDULER):
            raise ConfigError(
                "the workers are picbench's, but the scheduler is not",
                hint=f"scheduler_cls={ASYNC_SCHEDULER} and additional_config with 'pic'",
            )
        check_config(self.vllm_config)
        # The model's table of RoPE is made later, with many threads.
        settle_first_calls()
        super().init_device()

    def _make_model_runner(self) -> Any:
        assert self.device is not None
        if self.use_v2_model_runner:
            from picbench.engines.vllm.worker.cuda.runner import PicModelRunner

            return PicModelRunner(self.vllm_config, self.device)
        from picbench.engines.vllm.worker.cuda.runner_v1 import PicModelRunnerV1

        return PicModelRunnerV1(self.vllm_config, self.device)

    def self_check(self) -> list[tuple[str, float, float]]:
        """The error of rotations: name, error, largest that passes.

        Attention of plain requests is vLLM's own here, so planned ones are compared with them.
        """
        model: Any = self.vllm_config.model_config
        runner: Any = self.model_runner
        rope = runner.attention.rope
        error = rotary_error(runner.get_model(), rope, model.get_head_size(), model.dtype)
        return [("rotary table", error, TOLERANCE[model.dtype])]

    def workspace_bytes(self) -> int:
        """Device memory that picbench's kernels and copies to tiers hold beside the KV cache."""
        runner: Any = self.model_runner
        return int(runner.attention.planner.nbytes) + self.tier_client.workspace_bytes

    def namespace(self) -> bytes:
        """As on CPU, and whether keys are cached with RoPE."""
        assert self._settings is not None
        # These words are part of the names under which tiers store chunks.
        keys = b"unrotated" if self._settings.keys_without_rope else b"chunk-local"
        return hashlib.sha256(super().namespace() + b"cuda" + keys).digest()
