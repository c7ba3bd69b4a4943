"""Memory that attention holds beside the KV pool."""

from collections.abc import Callable
from pathlib import Path

import pytest

from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, Request, Text


@pytest.mark.engine
def test_an_engine_tells_what_its_copies_and_scratch_hold(
    llama: Path, draw: Callable[[int, int], tuple[int, ...]]
) -> None:
    chunks = [Chunk(tokens=draw(40, seed)) for seed in (1, 2)]
    settings = {"dtype": "float32", "kv_blocks": 100, "context": 512, "tiers": ""}
    with Engine(EngineConfig(str(llama), **settings)) as engine:
        assert engine.workspace_bytes == 0
        engine.generate([Request([*chunks, Text(tokens=draw(9, 3))])], max_tokens=1)
        scratch = engine.workspace_bytes
        engine.generate([Request([*chunks, Text(tokens=draw(9, 3))])], max_tokens=8)
        copied = engine.workspace_bytes
        assert copied > scratch > 0
        assert engine.describe()["workspace_bytes"] == copied
