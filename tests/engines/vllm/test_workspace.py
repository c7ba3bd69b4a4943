"""Memory that attention holds beside the KV pool."""

import json
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


@pytest.mark.engine
def test_an_engine_tells_its_memory_and_what_it_evicts(
    llama: Path, draw: Callable[[int, int], tuple[int, ...]]
) -> None:
    model = json.loads((llama / "config.json").read_text())
    head = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
    block = 2 * model["num_hidden_layers"] * model["num_key_value_heads"] * head * 16 * 4
    settings = {"dtype": "float32", "kv_blocks": 60, "context": 256, "tiers": ""}
    requests = [
        Request([Chunk(tokens=draw(40, seed)), Text(tokens=draw(9, 100))]) for seed in range(30)
    ]
    with Engine(EngineConfig(str(llama), **settings)) as engine:
        assert engine.describe()["block_bytes"] == block
        engine.generate(requests[:3], max_tokens=1)
        assert engine.evictions == {"chunk": 0, "prefix": 0}
        # A chunk has three blocks, so that thirty of them do not fit the pool.
        engine.generate(requests, max_tokens=1, concurrency=1)
        assert engine.evictions["chunk"] >= 3 * 30 - 60
        [found] = engine.memory_use
        assert found.device == "cpu"
        assert found.workspace_bytes == engine.workspace_bytes > 0
        assert found.pool_bytes >= 60 * block
        assert found.weights_bytes > 0
        assert found.residual_bytes is not None
