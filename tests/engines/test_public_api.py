"""The public names of picbench.engines."""

import subprocess
import sys

import pytest

from picbench import engines


def loaded(code: str) -> set[str]:
    """Which of the heavy packages a fresh interpreter loads to run the code."""
    check = f"{code}\nimport sys; print(*({{'torch', 'vllm', 'transformers'}} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_nothing_heavy_is_loaded_at_import() -> None:
    assert loaded("import picbench.engines") == set()


def test_requests_are_described_without_an_engine() -> None:
    assert (
        loaded("from picbench.engines import Chunk, EngineConfig, Request, Schema, Text") == set()
    )


@pytest.mark.parametrize("name", engines.__all__)
def test_public_names_are_found(name: str) -> None:
    assert getattr(engines, name).__name__ == name


def test_unknown_names_raise_as_in_any_module() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        getattr(engines, "Motor")  # noqa: B009
