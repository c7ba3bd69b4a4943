"""A worker's own KV connector.

vLLM keeps the worker's connector in a global of the process
(vllm/distributed/kv_transfer/kv_transfer_state.py). Several engines may live in one process, with
and without picbench, so a worker puts its connector there for as long as it works, and no longer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer import kv_transfer_state as state

from picbench.engines.vllm.transfer.namespace import namespace
from picbench.engines.vllm.transfer.tier_client import TierClient


@dataclass(slots=True)
class ConnectorScope:
    """The connector of one worker, once the worker has made it."""

    connector: Any = None

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Stand in vLLM's global; what others put there comes back afterwards."""
        before, state._KV_CONNECTOR_AGENT = state._KV_CONNECTOR_AGENT, self.connector
        try:
            yield
        finally:
            self.connector, state._KV_CONNECTOR_AGENT = state._KV_CONNECTOR_AGENT, before


class ConnectorWorkerMixin:
    """What every worker of picbench does with its connector; stands in front of vLLM's worker.

    Upstream: vllm/v1/worker/gpu_worker.py of vLLM 0.32.0, from which the CPU worker derives.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._agent = ConnectorScope()

    @property
    def tier_client(self) -> TierClient:
        """What moves chunk KV between this worker's pool and the tiers."""
        tier_client: TierClient = self._agent.connector.tier_client
        return tier_client

    def namespace(self) -> bytes:
        """What this worker's chunk KV depends on beside its tokens."""
        worker: Any = self
        return namespace(worker.vllm_config, worker.model_runner.get_model(), worker.rank)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocate the KV cache, and name what its content depends on."""
        with self._agent.at_work():
            _upstream(super()).initialize_from_config(kv_cache_config)
        self.tier_client.belong(self.namespace())

    def compile_or_warm_up_model(self) -> Any:
        """Compile the model and capture graphs with this worker's own connector."""
        with self._agent.at_work():
            return _upstream(super()).compile_or_warm_up_model()

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a step with this worker's own connector."""
        with self._agent.at_work():
            return _upstream(super()).execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """End a step with this worker's own connector."""
        with self._agent.at_work():
            return _upstream(super()).sample_tokens(grammar_output)

    def shutdown(self) -> None:
        """Close the tiers, then the worker."""
        with self._agent.at_work():
            _upstream(super()).shutdown()


def _upstream(parent: Any) -> Any:
    # A type checker cannot know which of vLLM's workers stands behind.
    return parent
