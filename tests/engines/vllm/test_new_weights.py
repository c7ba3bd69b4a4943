"""vLLM's ways to give a running engine other weights: no chunk of the old ones is served again."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chunk_bench import config, serve
from safetensors.torch import load_file, save_file

from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, Request, Result, Text

ALGORITHMS = ("naive", "epic:k=16")


@pytest.fixture(scope="module")
def tuned(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model after training of nothing but linear layers."""
    folder = tmp_path_factory.mktemp("tuned") / "model"
    shutil.copytree(llama, folder)
    weights = load_file(folder / "model.safetensors")
    linear = [name for name in weights if name.endswith("_proj.weight")]
    assert linear
    for name in linear:
        weights[name] = weights[name].flip(0)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def engine(llama: Path, tmp_path: Path) -> Iterator[Engine]:
    with Engine(config(llama, tiers=f"host:8MiB,disk:{tmp_path}:64MiB")) as engine:
        yield engine


def reload(engine: Engine, folder: Path) -> None:
    engine._running.engine.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})


def answers(results: list[Result]) -> list[Any]:
    return [(result.tokens, result.logprobs) for result in results]


def test_trained_layers_do_not_meet_in_a_tier(
    llama: Path, tuned: Path, tmp_path: Path, chunks: list[Chunk], question: Text
) -> None:
    request = Request([*chunks, question], "naive")
    for model in (llama, tuned):
        with Engine(config(model, tiers=f"disk:{tmp_path}:64MiB")) as engine:
            (found,) = serve(engine, request)
            engine.drain()
            assert found.hits.tiers == {}


def test_reloaded_weights_do_not_read_chunks_of_the_old_ones(
    engine: Engine, tuned: Path, chunks: list[Chunk], question: Text
) -> None:
    requests = [Request([*chunks, question], algorithm) for algorithm in ALGORITHMS]
    serve(engine, *requests)
    engine.drain()
    reload(engine, tuned)
    assert engine._running.engine.reset_prefix_cache()
    found = [serve(engine, request)[0] for request in requests]
    engine.drain()
    assert found[0].hits.tiers == {}
    engine.reset()
    assert answers([serve(engine, request)[0] for request in requests]) == answers(found)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_chunk_that_an_emptied_pool_has_no_more_is_not_stored(
    engine: Engine, tuned: Path, chunks: list[Chunk], question: Text, algorithm: str
) -> None:
    """Between two steps, when the chunk was computed and its storing commanded."""
    request = Request([*chunks, question], algorithm)
    tag = engine.submit(request)
    store = engine._running.scheduler.chunk_store
    while not store.commands.stores:
        engine.step()
    engine.abort(tag)
    engine._running.engine.sleep(level=1)
    reload(engine, tuned)
    engine._running.engine.wake_up()
    engine.drain()
    (found,) = serve(engine, request)
    engine.drain()
    engine.reset()
    assert answers(serve(engine, request)) == answers([found])
    engine.drain()
    assert engine.drained
