"""vLLM's own way to drop the cache while requests run: they lose their blocks and start over."""

from typing import Any

import pytest

from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, Request, Text


@pytest.mark.parametrize("algorithm", ["naive", "epic:k=16", "epic:k=16:copy=shared"])
def test_references_of_waiting_requests_are_dropped(
    starved: Engine, draw: Any, algorithm: str
) -> None:
    """The request at the head of the queue references the chunk that it has already.

    The other one is missing, and cannot be compiled while the running requests have the pool.
    """
    there, missing = Chunk(tokens=draw(160, 70)), Chunk(tokens=draw(240, 71))
    running = [
        Request([Text(tokens=draw(330, 72 + i))], "prefix", max_tokens=150) for i in range(2)
    ]
    waiting = Request([there, missing, Text(tokens=draw(5, 75))], algorithm, max_tokens=4)
    first = Request([there, Text(tokens=draw(5, 76))], "naive", max_tokens=1)
    requests = [*running, waiting]
    expected = [r.tokens for r in starved.generate(requests, ignore_eos=True, concurrency=1)]
    starved.reset()
    starved.generate([first])
    tags = [starved.submit(request, ignore_eos=True) for request in requests]
    linker, found = starved._running.scheduler.linker, dict[str, Any]()
    while not linker.held():
        found |= starved.step()
    assert not found
    assert starved._running.engine.reset_prefix_cache(reset_running_requests=True)
    while len(found) < len(tags):
        found |= starved.step()
    assert [found[tag].tokens for tag in tags] == expected
    starved.drain()
    assert starved.drained
    starved.reset()
