"""When missing chunks are compiled: the order of steps, and equal answers in a small pool."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from chunk_bench import config

from picbench.engines.config import CompileOrder
from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, PromptSegment, Request, Text

BLOCKS = 60


@pytest.fixture(scope="module")
def engines(llama: Path) -> Iterator[dict[str, Engine]]:
    started: dict[str, Engine] = {}
    try:
        for order in get_args(CompileOrder):
            settings = config(llama, compile_order=order, kv_blocks=BLOCKS, batch_tokens=64)
            started[order] = Engine(settings)
        yield started
    finally:
        for engine in started.values():
            engine.close()


def test_answers_do_not_depend_on_the_order(engines: dict[str, Engine], draw: Any) -> None:
    """Chunks that many requests need, copies, plain requests; the pool holds two or three."""
    chunks = [Chunk(tokens=draw(count, 600 + count)) for count in (150, 35, 81, 64, 17)]
    algorithms = ("minipic", "mepic", "epic:k=4", None, "naive", "full")
    requests = []
    for i in range(18):
        few: list[PromptSegment] = [chunks[(i * n) % 5] for n in (1, 2, 3)[: 1 + i % 3]]
        requests.append(Request([*few, Text(tokens=draw(11, 900 + i))], algorithms[i % 6]))
    found = {}
    for order, engine in engines.items():
        results = engine.generate(requests, max_tokens=6, ignore_eos=True)
        found[order] = [result.tokens for result in results]
        engine.drain()
        assert engine._running.scheduler.linker.idle
        assert engine._running.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == BLOCKS
    assert found["batch"] == found["head"]
    assert found["isps"] == found["head"]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("head", ["compile", "first", "ready", "compile", "last"]),
        ("batch", ["compile", "compile", "first", "ready", "last"]),
        ("isps", ["ready", "compile", "first", "compile", "last"]),
    ],
)
def test_what_is_scheduled_first(
    engines: dict[str, Engine], draw: Any, order: str, expected: list[str]
) -> None:
    """One request decodes while others arrive: two miss a chunk, one between them misses none."""
    engine = engines[order]
    seen = _scheduled(engine)
    known, *new = [Chunk(tokens=draw(60, 60 * i + len(order))) for i in range(1, 4)]
    question = Text(tokens=draw(9, 2))
    _submit(engine, "running", Request([known, question], "naive"), tokens=40)
    running = engine._running.engine
    for _ in range(4):
        running.step()
    seen.clear()
    for name, chunk in (("first", new[0]), ("ready", known), ("last", new[1])):
        _submit(engine, name, Request([chunk, question], "naive"), tokens=2)
    while running.has_unfinished_requests():
        running.step()
    assert seen == expected


def _scheduled(engine: Engine) -> list[str]:
    """The names of requests, in the order in which steps begin them."""
    scheduler: Any = engine._running.scheduler
    upstream, seen = scheduler.schedule, list[str]()

    def schedule(*args: Any, **kwargs: Any) -> Any:
        output = upstream(*args, **kwargs)
        names = (request.req_id for request in output.scheduled_new_reqs)
        seen.extend("compile" if "compile" in name else name.split("-")[0] for name in names)
        return output

    scheduler.schedule = schedule
    return seen


def _submit(engine: Engine, name: str, request: Request, tokens: int) -> None:
    prepared = engine._prepare(request, tokens, None, True)
    prompt: Any = {"prompt_token_ids": prepared.prompt_token_ids}
    engine._running.engine.add_request(name, prompt, prepared.sampling_params)
