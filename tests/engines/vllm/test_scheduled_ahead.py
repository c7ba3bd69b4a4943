"""Steps that are scheduled before the previous one has ended, as on a GPU.

vLLM does so on no CPU. Here its scheduler and its engine core do, over steps that run at once.
"""

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, Request, Result, Text
from picbench.engines.vllm import settings
from picbench.engines.vllm.scheduler.scheduler import PicAsyncScheduler
from picbench.engines.vllm.worker.cpu import worker

#: More steps than any of these requests needs.
STEPS = 60


@pytest.fixture(scope="module")
def ahead(pebble: Path) -> Iterator[Engine]:
    """An engine whose scheduler is one step ahead of the model."""
    config = EngineConfig(
        tiers="", model=str(pebble), dtype="float32", kv_blocks=200, context=512, batch_tokens=64
    )
    with pytest.MonkeyPatch.context() as patch:
        for module in (settings, worker):
            patch.setattr(module, "SCHEDULER", settings.ASYNC_SCHEDULER)
        engine = Engine(config)
    with engine:
        core: Any = engine._running.engine.engine_core
        core = core.engine_core
        assert isinstance(core.scheduler, PicAsyncScheduler)
        core.batch_queue_size, core.batch_queue = 2, deque(maxlen=2)
        core.step_fn = core.step_with_batch_queue
        yield engine
        # What was scheduled last ends with the next steps.
        engine.drain()


def _asked(chunks: list[Chunk], algorithm: str, last: int) -> Request:
    return Request([*chunks, Text(tokens=(7, 8, last))], algorithm)


def _serve(engine: Engine, requests: list[Request], steps: int) -> list[Result]:
    """The results of requests that come `steps` steps one after another."""
    tags: list[str] = []
    found: dict[str, Result] = {}
    for request in requests:
        tags.append(engine.submit(request, max_tokens=4))
        for _ in range(steps):
            found |= engine.step()
    for _ in range(STEPS):
        found |= engine.step()
        if len(found) == len(tags):
            return [found[tag] for tag in tags]
    for tag in tags:
        engine.abort(tag)
    pytest.fail("requests wait for ever")


@pytest.mark.parametrize("algorithm", ["epic:k=4", "cacheblend:r=0.5", "mepic", "naive"])
@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_chunks_that_begin_alike_are_compiled_once(
    ahead: Engine, algorithm: str, steps: int
) -> None:
    """The second one while the first one is: neither is taken for unfinished because of the other.

    Else each is compiled again because the other is, and no request ever runs.
    """
    ahead.reset()
    begin = tuple(range(100, 116))
    first, second = (Chunk(tokens=(*begin, *range(n, n + 20))) for n in (200, 300))
    requests = [_asked([first], algorithm, 1), _asked([first, second], algorithm, 2)]
    alone = _serve(ahead, requests, STEPS)
    ahead.reset()
    found = _serve(ahead, requests, steps)
    assert [result.tokens for result in found] == [result.tokens for result in alone]
    # The page that both begin with may have been compiled twice.
    assert 16 + 2 * 20 <= sum(result.counts.compiled for result in found) <= 2 * 36
