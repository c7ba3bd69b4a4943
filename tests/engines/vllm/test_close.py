"""A closed engine gives back what it held, so that another one may start in the same process."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from small_engine import small_config
from torch import nn

from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, Request, Text

# A GPU compiles the first model for two minutes.
pytestmark = pytest.mark.timeout(600)

PROMPT = Request([Chunk(tokens=tuple(range(3, 80))), Text(tokens=(5, 6, 7))])


def held(engine: Engine) -> dict[str, "weakref.ref[Any]"]:
    """What a worker has: weights, whatever rotates and attends, the pool's tensors, the runner."""
    worker = engine._running.engine.model_executor.driver_worker.worker  # type: ignore[union-attr]
    runner = worker.model_runner
    model = runner.get_model()
    modules = dict(model.named_modules()) | {"model": model, "runner": runner}
    tensors = dict(model.named_parameters()) | {"pool": worker.tier_client._pool}
    return {name: weakref.ref(value) for name, value in (modules | tensors).items()}


@pytest.mark.parametrize("tiers", ["", "host:8MiB"])
def test_a_closed_engine_holds_no_weights_and_no_pool(llama: Path, tiers: str) -> None:
    engine = Engine(small_config(llama, 90, 512, tiers=tiers))
    engine.generate([PROMPT, PROMPT], max_tokens=4)
    references = held(engine)
    assert len(references) > 20
    engine.close()
    values = {name: reference() for name, reference in references.items()}
    assert [name for name, value in values.items() if has_memory(value)] == []


def has_memory(value: Any) -> bool:
    """Whether something is alive, and is not a module without its weights, as torch keeps them."""
    return list(value.parameters()) != [] if isinstance(value, nn.Module) else value is not None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="it is about the memory of a GPU")
@pytest.mark.parametrize("more", [{}, {"eager": True}, {"tiers": "host:64MiB"}])
def test_a_gpu_has_its_memory_back(llama: Path, more: dict[str, Any]) -> None:
    """The second engine has what the first one had; 64 MiB are the libraries' and the context's."""
    free = []
    for _ in range(3):
        with Engine(small_config(llama, 100_000, 512, device="cuda", **more)) as engine:
            engine.generate([PROMPT, PROMPT], max_tokens=4)
            pool = 100_000 * engine.describe()["block_bytes"]
        torch.cuda.synchronize()
        free.append(torch.cuda.mem_get_info()[0])
        assert torch.cuda.memory_allocated() < pool // 10
    assert pool > 1 << 30
    assert min(free[1:]) > free[0] - (64 << 20)
