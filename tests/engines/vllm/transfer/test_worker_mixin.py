"""When a worker names the chunks that it stores anew: whenever its weights may be others."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from picbench.engines.vllm.transfer.worker_mixin import ConnectorWorkerMixin, namespace


class Upstream:
    """A worker of vLLM that may fail to load weights."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def reload_weights(self, path: str) -> None:
        self._load()

    def finish_weight_update(self) -> None:
        self._load()

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
        tier_client = SimpleNamespace(set_namespace=self.names.append)
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
        dispatch_cpu_unquantized_gemm(self.linear, remove_weight=True)
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


def embeddings_swapped(model: Model) -> None:
    model.embedding.data[[100, 500]] = model.embedding.data[[500, 100]]


def low_rank(model: Model) -> None:
    model.linear.weight.data += torch.ones(OUT, 1) @ torch.full((1, WIDTH), 0.01)  # type: ignore[operator]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("change", [one_embedding, last_embedding, embeddings_swapped, low_rank])
def test_other_weights_have_other_names(change: Callable[[Model], None], packed: bool) -> None:
    before, after = Model(), Model()
    change(after)
    if packed:
        before, after = before.pack(), after.pack()
        assert not before.linear.weight.numel()  # type: ignore[union-attr, operator]
    assert name(before) != name(after)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_router_that_all_ranks_have_whole_is_read(dtype: torch.dtype) -> None:
    found = []
    for scale in (1.0, 1.0, 2.0):
        model = Model()
        size = model.linear.input_size_per_partition
        del model.linear.input_size_per_partition
        model.linear.input_size = size
        model.linear.weight = nn.Parameter((scale * model.linear.weight).to(dtype))  # type: ignore[operator]
        found.append(name(model.pack()))
    assert found[0] == found[1] != found[2]


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
