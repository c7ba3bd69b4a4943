"""The scope of a worker's KV connector, and when the namespace of its values in tiers is set.

vLLM keeps the worker's connector in a process-wide global
(vllm/distributed/kv_transfer/kv_transfer_state.py). One process may run several engines, with and
without picbench, so a worker sets the global only while one of its methods runs.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state as state

from picbench.engines.vllm.transfer.namespace import namespace, packing_noted
from picbench.engines.vllm.transfer.tier_client import TierClient


@dataclass(slots=True)
class ConnectorScope:
    """Sets vLLM's global to one worker's connector; None until the worker has created it."""

    connector: Any = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Set the global, and restore what it held before."""
        before, state._KV_CONNECTOR_AGENT = state._KV_CONNECTOR_AGENT, self.connector
        try:
            yield
        finally:
            self.connector, state._KV_CONNECTOR_AGENT = state._KV_CONNECTOR_AGENT, before


class ConnectorWorkerMixin:
    """Runs the methods of a vLLM worker within its connector's scope; comes before it in bases.

    Upstream: vllm/v1/worker/gpu_worker.py of vLLM 0.32.0, from which the CPU worker derives.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._connector_scope = ConnectorScope()

    @property
    def tier_client(self) -> TierClient:
        """The client that moves chunk KV between this worker's pool and the tiers."""
        tier_client: TierClient = self._connector_scope.connector.tier_client
        return tier_client

    def namespace(self) -> bytes:
        """A digest of what this worker's chunk KV depends on besides its tokens."""
        worker: Any = self
        return namespace(worker.vllm_config, worker.model_runner.get_model(), worker.rank)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, whose weights name chunks in tiers."""
        with packing_noted():
            _upstream(super()).load_model(*args, **kwargs)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocate the KV cache, and set the namespace of its values in tiers."""
        with self._connector_scope.active():
            _upstream(super()).initialize_from_config(kv_cache_config)
        self._set_namespace()

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Load other weights; chunks that are stored from now on are theirs."""
        with self._weights_renamed():
            _upstream(super()).reload_weights(*args, **kwargs)

    def update_weights(self, *args: Any, **kwargs: Any) -> None:
        """Receive some of a trainer's weights."""
        with packing_noted():
            _upstream(super()).update_weights(*args, **kwargs)

    def finish_weight_update(self) -> None:
        """End an update by a trainer; chunks that are stored from now on are the new weights'."""
        with self._weights_renamed():
            _upstream(super()).finish_weight_update()

    def get_kv_connector_handshake_metadata(self) -> dict[tuple[int, int], Any]:
        """What its namespace in tiers is called in the log, for the scheduler's connector."""
        return {(0, 0): self.tier_client.has_tiers and self.tier_client._name(b"").hex()[:16]}

    def compile_or_warm_up_model(self) -> Any:
        """Compile the model and capture graphs."""
        with self._connector_scope.active():
            return _upstream(super()).compile_or_warm_up_model()

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a step, and measure it if it computes something."""
        computes = scheduler_output.total_num_scheduled_tokens > 0
        measured = self.tier_client.step() if computes else nullcontext()
        with self._connector_scope.active(), measured:
            return _upstream(super()).execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """End a step."""
        with self._connector_scope.active(), self.tier_client.step():
            return _upstream(super()).sample_tokens(grammar_output)

    def shutdown(self) -> None:
        """Close the tiers, then the worker, and free weights, pool and graphs.

        Upstream drops what its own runner has of them. Ours also holds passes through the model,
        and upstream's V2 runner leaves layers in the configuration, which outlives the worker.
        """
        worker: Any = self
        # A worker that failed to start has no runner, and a runner that failed to load no model.
        model = getattr(getattr(worker, "model_runner", None), "model", None)
        with self._connector_scope.active():
            _upstream(super()).shutdown()
        if model is not None:
            _free_weights(model)
        worker.vllm_config.compilation_config.static_forward_context.clear()
        worker.model_runner = model = None
        _free_graphs(worker.vllm_config)
        torch.accelerator.empty_cache()

    @contextmanager
    def _weights_renamed(self) -> Iterator[None]:
        try:
            with packing_noted():
                yield
        finally:
            self._set_namespace()

    def _set_namespace(self) -> None:
        # Weights may be loaded before there is a pool. To read them all takes seconds.
        if self._connector_scope.connector is not None and self.tier_client.has_tiers:
            self.tier_client.set_namespace(self.namespace())


def _free_weights(model: nn.Module) -> None:
    """Take a model's weights from its modules, some of which torch holds for good.

    vLLM leaves a hook in torch for each compiled module, and torch 2.11 the modules that it could
    not guard (`_CLOSURE_VARS` of torch/_dynamo/guards.py).
    """
    for module in model.modules():
        if isinstance(module, TorchCompileWithNoGuardsWrapper):
            module.cleanup()
        # Buffers stay: engines of one process share modules that rotate (vLLM's `_ROPE_DICT`).
        module._parameters.clear()


def _free_graphs(config: VllmConfig) -> None:
    for wrapper in tuple(CUDAGraphWrapper._all_instances):
        if wrapper.vllm_config is config:
            wrapper.clear_graphs()
    gc.collect()
    # cuBLAS keeps a workspace for each stream that graphs were captured on, 32 MiB on Hopper, and
    # graphs of another engine use theirs. The call is what torch documents (notes/cuda.rst).
    graphs = any(issubclass(type(value), torch.cuda.CUDAGraph) for value in gc.get_objects())
    if torch.cuda.is_available() and not graphs:
        torch._C._cuda_clearCublasWorkspaces()


def _upstream(parent: Any) -> Any:
    # Which of vLLM's workers comes next in the bases is not known statically.
    return parent
