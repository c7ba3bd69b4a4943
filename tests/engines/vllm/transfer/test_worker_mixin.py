"""When a worker names the chunks that it stores anew: whenever its weights may be others."""

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.linear import LinearBase

from picbench.engines.vllm.transfer.namespace import namespace, packing_noted
from picbench.engines.vllm.transfer.worker_mixin import ConnectorWorkerMixin
from picbench.engines.vllm.worker.cpu.worker import PicCPUWorker


class Upstream:
    """A worker of vLLM that may fail to load weights."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def reload_weights(self, path: str) -> None:
        self._load()

    def finish_weight_update(self) -> None:
        self._load()

    def shutdown(self) -> None:
        pass

    def _load(self) -> None:
        if self.error is not None:
            raise self.error


class MixedWorker(ConnectorWorkerMixin, Upstream):
    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(error)
        self.names: list[bytes] = []

    def namespace(self) -> bytes:
        return b"new"

    def add_pool(self) -> None:
        tier_client = SimpleNamespace(set_namespace=self.names.append, has_tiers=True)
        self._connector_scope.connector = SimpleNamespace(tier_client=tier_client)


LOADS: dict[str, Any] = {
    "reload": lambda worker: worker.reload_weights("path"),
    "update": lambda worker: worker.finish_weight_update(),
}


@pytest.mark.parametrize("way", LOADS)
def test_other_weights_are_named_anew(way: str) -> None:
    worker = MixedWorker()
    LOADS[way](worker)  # before there is a pool
    worker.add_pool()
    LOADS[way](worker)
    assert worker.names == [b"new"]


@pytest.mark.parametrize("way", LOADS)
def test_weights_that_were_loaded_in_part_are_named_anew(way: str) -> None:
    worker = MixedWorker(OSError("gone"))
    worker.add_pool()
    with pytest.raises(OSError, match="gone"):
        LOADS[way](worker)
    assert worker.names == [b"new"]


class Compiled(nn.Linear, TorchCompileWithNoGuardsWrapper):
    """A module that torch compiles as vLLM has it do on a GPU."""

    def __init__(self) -> None:
        nn.Linear.__init__(self, 2, 2)
        TorchCompileWithNoGuardsWrapper.__init__(self)


class Graphs(CUDAGraphWrapper):
    """What has captured one CUDA graph; there is no GPU to make one of."""

    def __init__(self, config: VllmConfig) -> None:
        self.vllm_config = config
        self.concrete_cudagraph_entries: dict[Any, Any] = {"a batch": "its graph"}
        CUDAGraphWrapper._all_instances.add(self)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One with a compiled model, on what looks like a machine with an accelerator."""
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    mode = CompilationConfig(mode=CompilationMode.DYNAMO_TRACE_ONCE, backend="eager")
    worker: Any = MixedWorker()
    worker.vllm_config = VllmConfig(compilation_config=mode)
    with set_current_vllm_config(worker.vllm_config):
        worker.model_runner = SimpleNamespace(model=nn.Sequential(Compiled()))
    return worker


def test_a_worker_that_is_shut_down_leaves_no_compiled_module(worker: Any) -> None:
    assert worker.model_runner.model(torch.zeros(2)).shape == (2,)
    module = weakref.ref(worker.model_runner.model[0])
    worker.shutdown()
    gc.collect()
    assert module() is None


def test_modules_that_something_else_holds_go_without_their_weights(worker: Any) -> None:
    module = worker.model_runner.model[0]
    module.register_buffer("shared", torch.ones(1))
    weight = weakref.ref(module.weight)
    worker.shutdown()
    assert weight() is None
    assert list(module.buffers()) == [1]


def test_only_the_workers_own_graphs_are_freed(worker: Any) -> None:
    own, other = Graphs(worker.vllm_config), Graphs(VllmConfig())
    worker.shutdown()
    assert own.concrete_cudagraph_entries == {}
    assert len(other.concrete_cudagraph_entries) == 1


@pytest.mark.parametrize("graphs", [0, 1])
def test_workspaces_of_cublas_are_freed_when_no_graph_uses_them(
    worker: Any, monkeypatch: pytest.MonkeyPatch, graphs: int
) -> None:
    class Graph:
        pass

    calls: list[str] = []
    alive = [Graph() for _ in range(graphs)]
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    clear = "_cuda_clearCublasWorkspaces"
    monkeypatch.setattr(torch._C, clear, lambda: calls.append(clear), raising=False)
    worker.shutdown()
    assert len(calls) == 1 - len(alive)


ROWS, WIDTH, OUT = 3000, 96, 64


class Model(nn.Module):
    """An embedding and a linear layer, whose matrix vLLM packs on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        numbers = torch.Generator().manual_seed(0)
        self.embedding = nn.Parameter(torch.randn(ROWS, WIDTH, generator=numbers))
        self.linear = nn.Module()
        self.linear.input_size_per_partition = WIDTH
        self.linear.weight = nn.Parameter(torch.randn(OUT, WIDTH, generator=numbers))

    def pack(self) -> "Model":
        with packing_noted():
            utils.dispatch_cpu_unquantized_gemm(self.linear, remove_weight=True)
        return self


def config(dtype: torch.dtype = torch.float32) -> Any:
    text_config = SimpleNamespace(to_json_string=lambda: "{}")
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype=dtype, hf_text_config=text_config),
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=16),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )


def name(model: nn.Module, rank: int = 0, **changes: Any) -> bytes:
    return namespace(config(**changes), model, rank)


def one_embedding(model: Model) -> None:
    model.embedding.data[1001, 7] += 1


def last_embedding(model: Model) -> None:
    model.embedding.data[-1, -1] += 1


def neighbours_swapped(model: Model) -> None:
    model.embedding.data[[10, 11]] = model.embedding.data[[11, 10]]


def two_signs(model: Model) -> None:
    model.embedding.data[5, [1, 3]] *= -1


def matrix(model: Model) -> torch.Tensor:
    weight = model.linear.weight
    assert isinstance(weight, nn.Parameter)
    return weight.data


def low_rank(model: Model) -> None:
    matrix(model).add_(torch.ones(OUT, 1) @ torch.full((1, WIDTH), 0.01))


def rows_swapped(model: Model) -> None:
    matrix(model)[[0, 1]] = matrix(model)[[1, 0]]


def one_weight(model: Model) -> None:
    matrix(model)[OUT - 1, WIDTH - 2] *= -1


def scaled(model: Model) -> None:
    matrix(model).mul_(2)


CHANGES = (
    one_embedding,
    last_embedding,
    neighbours_swapped,
    two_signs,
    low_rank,
    rows_swapped,
    one_weight,
    scaled,
)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_other_weights_have_other_names(change: Callable[[Model], None], packed: bool) -> None:
    before, after = Model(), Model()
    change(after)
    if packed:
        before, after = before.pack(), after.pack()
        assert not before.linear.weight.numel()  # type: ignore[union-attr, operator]
    assert name(before) != name(after)


def test_a_matrix_that_was_packed_unseen_is_like_no_other() -> None:
    model = Model()
    utils.dispatch_cpu_unquantized_gemm(model.linear, remove_weight=True)
    assert name(model) != name(model)


def test_weights_that_onednn_took_are_like_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of INT8 layers it leaves scales, which other weights may share."""
    monkeypatch.setattr(ConnectorWorkerMixin, "namespace", lambda _: b"same")
    layer = LinearBase.__new__(LinearBase)
    nn.Module.__init__(layer)
    layer.weight = nn.Parameter(torch.zeros(2, 2))
    worker: Any = PicCPUWorker.__new__(PicCPUWorker)
    monkeypatch.setattr(worker, "get_model", lambda: nn.ModuleList([layer]), raising=False)
    assert worker.namespace() == worker.namespace() == b"same"
    layer.weight = None  # type: ignore[assignment]
    assert worker.namespace() != worker.namespace()


def test_a_persistent_buffer_is_read_and_a_table_is_not() -> None:
    """Scales of the KV are in one; tables follow from the configuration."""
    plain, scaled, with_table = Model(), Model(), Model()
    for model, scale in ((plain, 1.0), (scaled, 2.0), (with_table, 1.0)):
        model.register_buffer("scale", torch.tensor(scale))
    with_table.register_buffer("table", torch.ones(3), persistent=False)
    assert name(plain) == name(with_table) != name(scaled)


def test_layers_swapped_and_types_have_other_names() -> None:
    before, swapped, typed = Model(), Model(), Model()
    for model in (before, swapped, typed):
        model.other = nn.Parameter(torch.arange(OUT * WIDTH, dtype=torch.float32).view(OUT, WIDTH))
    swapped.linear.weight, swapped.other = swapped.other, swapped.linear.weight  # type: ignore[assignment]
    typed.other = nn.Parameter(typed.other.data.view(torch.int32), requires_grad=False)
    assert len({name(before), name(swapped), name(typed)}) == 3


@pytest.mark.parametrize("packed", [False, True])
def test_the_same_weights_have_the_same_names(packed: bool) -> None:
    one, other = (Model().pack() if packed else Model() for _ in range(2))
    assert name(one) == name(other)


def test_weights_anywhere_in_memory_have_the_same_names() -> None:
    model, moved = Model(), Model()
    storage = torch.empty(1 + ROWS * WIDTH)
    place = storage[1:].view(ROWS, WIDTH)
    moved.embedding.data = place.copy_(model.embedding.data)
    moved.linear.weight.data = model.linear.weight.data.T.contiguous().T  # type: ignore[union-attr]
    assert name(model) == name(moved)


def test_names_differ_by_dtype_and_rank() -> None:
    model = Model()
    names = [name(model), name(model, rank=1), name(model, dtype=torch.bfloat16)]
    assert len(set(names)) == 3
