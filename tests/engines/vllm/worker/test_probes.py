"""What a worker holds, tensor by tensor."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from picbench.engines.vllm.worker.probes import (
    CompilationLog,
    compiled_kernels,
    watch_compilations,
)

torch = pytest.importorskip("torch")

from picbench.engines.vllm.worker.probes import measure_memory, resident_bytes  # noqa: E402


def worker(**more: Any) -> Any:
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8, bias=False), torch.nn.Linear(8, 4, bias=False)
    )
    model.append(torch.nn.Linear(4, 8, bias=False))
    model[2].weight = model[0].weight  # Tied weights are held once.
    pool = torch.zeros(2, 100, dtype=torch.float16)
    runner = SimpleNamespace(kv_caches=[pool[0], pool[1]])
    return SimpleNamespace(
        device=torch.device("cpu"), get_model=lambda: model, model_runner=runner, **more
    )


def test_tensors_that_share_a_storage_are_counted_once() -> None:
    found = measure_memory(worker())
    assert found.device == "cpu"
    assert found.weights_bytes == 2 * 4 * 8 * 4
    assert found.pool_bytes == 2 * 100 * 2
    assert found.workspace_bytes == 0
    assert found.allocated_bytes is None


def test_weights_that_functions_keep_packed_are_counted() -> None:
    """As `dispatch_cpu_unquantized_gemm` leaves them: a tensor, or a handle of oneDNN."""
    held = worker()
    model, packed = held.get_model(), torch.zeros(5, 7)
    handler = SimpleNamespace(n=8, k=4, handler_tensor=torch.tensor(1))
    model[0].cpu_linear = lambda x, weight, bias: (packed, x)
    model[1].cpu_linear = lambda x, weight, bias: (handler, x)
    model[2].cpu_linear = lambda x, weight, bias: x
    assert measure_memory(held).weights_bytes == 2 * 4 * 8 * 4 + 5 * 7 * 4 + 8 * 4 * 4


def test_workspaces_are_those_that_the_worker_states() -> None:
    assert measure_memory(worker(workspace_bytes=lambda: 77)).workspace_bytes == 77


def test_resident_memory_is_the_process_s(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmRSS:\t    1024 kB\n")
    assert resident_bytes(status) == 1 << 20
    assert resident_bytes(tmp_path / "none") is None


knobs: Any = pytest.importorskip("triton").knobs


@pytest.fixture
def others() -> Iterator[list[dict[str, Any]]]:
    """What another hook was called with, such as vLLM's."""
    calls: list[dict[str, Any]] = []
    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = lambda **event: calls.append(event)
    yield calls
    knobs.runtime.jit_post_compile_hook = before


def compile_one(name: str) -> None:
    """What Triton does after a compilation (triton/runtime/jit.py, _call_hook)."""
    function = SimpleNamespace(module="some.module", name=name)
    knobs.runtime.jit_post_compile_hook(fn=function, key="", repr="", compile={})


def test_kernels_are_noted_by_name(others: list[dict[str, Any]]) -> None:
    assert compiled_kernels(None) == []
    watch_compilations(None)
    compile_one("first")
    compile_one("second")
    assert compiled_kernels(None) == ["some.module.first", "some.module.second"]
    assert [event["fn"].name for event in others] == ["first", "second"]


def test_to_watch_again_is_to_begin_again(others: list[dict[str, Any]]) -> None:
    for name in ("first", "second"):
        watch_compilations(None)
        compile_one(name)
    assert compiled_kernels(None) == ["some.module.second"]
    assert len(others) == 2
    # The first log is let go.
    assert not isinstance(knobs.runtime.jit_post_compile_hook.before, CompilationLog)
