"""Compilations are noted from a call on, and hooks of others still run."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from picbench.engines.vllm.worker.probes import (
    CompilationLog,
    compiled_kernels,
    watch_compilations,
)

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
