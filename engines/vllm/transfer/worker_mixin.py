"""The scope of a worker's KV connector, and the namespace of its values in tiers.

vLLM keeps the worker's connector in a process-wide global
(vllm/distributed/kv_transfer/kv_transfer_state.py). One process may run several engines, with and
without picbench, so a worker sets the global only while one of its methods runs.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.kv_transfer import kv_transfer_state as state

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

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocate the KV cache, and set the namespace of its values in tiers."""
        with self._connector_scope.active():
            _upstream(super()).initialize_from_config(kv_cache_config)
        self._set_namespace()

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Load other weights; chunks that are stored from now on are theirs."""
        try:
            _upstream(super()).reload_weights(*args, **kwargs)
        finally:
            self._set_namespace()

    def finish_weight_update(self) -> None:
        """End an update by a trainer; chunks that are stored from now on are the new weights'."""
        try:
            _upstream(super()).finish_weight_update()
        finally:
            self._set_namespace()

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
        """Close the tiers, then the worker."""
        with self._connector_scope.active():
            _upstream(super()).shutdown()

    def _set_namespace(self) -> None:
        # Weights may be loaded before there is a pool.
        if self._connector_scope.connector is not None:
            self.tier_client.set_namespace(self.namespace())


def _upstream(parent: Any) -> Any:
    # Which of vLLM's workers comes next in the bases is not known statically.
    return parent


#: Bytes of a parameter that are hashed as one sum.
_SUMMED = 8192

#: Columns that are read of a matrix which vLLM has packed.
_COLUMNS = 64


def namespace(vllm_config: Any, model: nn.Module, rank: int) -> bytes:
    """A digest of the weights, the layout and dtype of the KV, and the worker's share of it.

    Engines that serve the same checkpoint agree whatever its path. Any two others differ, also if
    one embedding was trained, or nothing but linear layers were.
    """
    digest = hashlib.sha256()
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    facts = (
        vllm_config.model_config.dtype,
        cache.cache_dtype,
        cache.block_size,
        parallel.tensor_parallel_size,
        rank,
        vllm_config.model_config.hf_text_config.to_json_string(),
    )
    digest.update(repr(facts).encode())
    for name, content in _weights(model):
        digest.update(name.encode())
        digest.update(content)
    return digest.digest()


@torch.inference_mode()
def _weights(model: nn.Module) -> Iterator[tuple[str, bytes]]:
    for name, parameter in sorted(model.named_parameters()):
        yield name, _sums(parameter.detach())
    for name, module in sorted(model.named_modules()):
        # A linear layer whose weights vLLM has packed: `dispatch_cpu_unquantized_gemm` in
        # vllm/model_executor/layers/utils.py of vLLM 0.32.0.
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and isinstance(weight, Tensor) and not weight.numel():
            yield name, _columns(module)


def _sums(parameter: Tensor) -> bytes:
    """The sums of a parameter's words, run by run, and what is left of them.

    Sums of integers are the same on every device; a change of one element changes one of them.
    """
    content = parameter.reshape(-1).view(torch.uint8)
    if content.storage_offset() % torch.int64.itemsize:
        content = content.clone()
    whole = content.numel() // _SUMMED * _SUMMED
    words = content[:whole].view(torch.int64).view(-1, _SUMMED // torch.int64.itemsize)
    return _bytes(words.sum(1)) + _bytes(content[whole:])


def _columns(module: Any) -> bytes:
    """Some columns of a packed matrix: its products with unit vectors, which are exact.

    Training changes all columns, also where what it adds has a low rank. Upstream leaves an empty
    parameter of the matrix's type; layers that all ranks have whole, such as a router, have no size
    of a partition (vllm/model_executor/layers/linear.py).
    """
    size = getattr(module, "input_size_per_partition", None) or module.input_size
    chosen = torch.arange(0, size, max(1, size // _COLUMNS))
    units = torch.zeros(len(chosen), size, dtype=module.weight.dtype)
    units[torch.arange(len(chosen)), chosen] = 1
    return _bytes(module.cpu_linear(units, module.weight, None))


def _bytes(values: Tensor) -> bytes:
    return values.contiguous().cpu().view(torch.uint8).numpy().tobytes()
