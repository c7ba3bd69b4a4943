"""vLLM's own way to drop the cache while requests run: they lose their blocks and start over."""

from typing import Any

import pytest
from chunk_bench import using_tiers
from tier_faults import Stuck

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


@pytest.mark.parametrize("tiers", [False, True])
@pytest.mark.parametrize("algorithm", ["naive", "epic:k=16"])
def test_loads_are_dropped(starved: Engine, draw: Any, algorithm: str, tiers: bool) -> None:
    """A tier that does not answer, while another request runs: both start over."""
    running = Request([Text(tokens=draw(100, 80))], "prefix", max_tokens=50)
    chunk = Chunk(tokens=draw(160, 81))
    loading = Request([chunk, Text(tokens=draw(40, 82))], algorithm, max_tokens=4)
    requests = [running, loading]
    expected = [r.tokens for r in starved.generate(requests, ignore_eos=True, concurrency=1)]
    starved.reset()
    stuck = Stuck()
    stuck.released.set()
    with using_tiers(starved, stuck):
        starved.generate([loading])
        starved.reset(tiers=False)
        stuck.released.clear()
        tags = [starved.submit(request, ignore_eos=True) for request in requests]
        scheduler = starved._running.scheduler
        while not scheduler._receiving():
            assert not starved.step()
        [name] = scheduler._receiving()
        [ids] = scheduler.kv_cache_manager.get_block_ids(name)
        assert starved._running.engine.reset_prefix_cache(
            reset_running_requests=True, reset_connector=tiers
        )
        blocks = scheduler.kv_cache_manager.block_pool.blocks
        assert all(blocks[index].ref_cnt for index in ids)
        stuck.released.set()
        found = dict[str, Any]()
        while len(found) < len(tags):
            found |= starved.step()
        starved.drain()
    assert [found[tag].tokens for tag in tags] == expected
    assert starved.drained
    starved.reset()
