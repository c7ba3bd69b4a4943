"""An engine for the measures of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.vllm.device import CPU, find


@pytest.fixture(scope="module")
def small_engine(llama: Path) -> Iterator[Engine]:
    """Four requests of 120 tokens at a time.

    Not for all files: another one's tests may end an engine between them, and with it what vLLM
    keeps for the whole process.
    """
    if find("auto") is not CPU:
        pytest.skip("this vLLM does not run on CPU")
    config = EngineConfig(
        model=str(llama),
        device="cpu",
        dtype="float32",
        context=120,
        kv_blocks=80,
        max_requests=4,
        tiers="",
    )
    with Engine(config) as engine:
        yield engine
