"""Requests never keep each other from ending: by loads, or by blocks that they wait for."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chunk_bench import config, using_tiers
from held import held
from tier_faults import Far, Stuck

from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, Request, Result, Text

#: Blocks of the pool, and steps after which requests that have not ended never will.
POOL, STEPS = 40, 20_000


@pytest.fixture(scope="module")
def engine(pebble: Path) -> Iterator[Engine]:
    with Engine(config(pebble, kv_blocks=POOL, context=640, batch_tokens=48)) as engine:
        yield engine


def submit(engine: Engine, *requests: Request) -> list[str]:
    return [engine.submit(request, max_tokens=2, ignore_eos=True) for request in requests]


def results(engine: Engine, tags: list[str]) -> list[Result]:
    """Results of requests in the order of their tags; requests that do not end are aborted."""
    ended: dict[str, Result] = {}
    for _ in range(STEPS):
        ended |= engine.step()
        if len(ended) == len(tags):
            break
    for tag in tags:
        engine.abort(tag)
    engine.drain()
    assert ended.keys() == set(tags)
    assert engine.drained
    return [ended[tag] for tag in tags]


def alone(engine: Engine, requests: list[Request]) -> list[tuple[int, ...]]:
    """The answers that requests get one after the other, without a tier's help."""
    tokens = [results(engine, submit(engine, request))[0].tokens for request in requests]
    engine.reset()
    return tokens


def test_loads_that_fail_together_are_tried_again(engine: Engine, draw: Any) -> None:
    """Two requests of 16 blocks load 12 of them in vain, and start over in a pool of 40.

    Their chunks take a step each to compile: the first are in the tier before the last are
    compiled, and are loaded from there.
    """
    requests = [
        Request(
            [*(Chunk(tokens=draw(48, 60 + 4 * i + k)) for k in range(4)), Text(tokens=draw(60, i))],
            "epic:k=0",
        )
        for i in range(3)
    ]
    expected = alone(engine, requests)
    far = Far()
    with using_tiers(engine, far):
        for request in requests:
            results(engine, submit(engine, request))
        engine.reset(tiers=False)
        far.inner._values.clear()
        found = results(engine, submit(engine, *requests))
    assert [result.tokens for result in found] == expected
    assert any(result.hits.tiers for result in found)
    engine.reset()


def test_a_request_whose_load_has_ended_gets_its_blocks(engine: Engine, draw: Any) -> None:
    """The next request has 7 of its 8 chunks in the pool, and references them while it waits.

    Its chunks and what the first one loads are the whole pool: there is no block for the rest of
    the first one, nor for the missing chunk.
    """
    loading = Request([Chunk(tokens=draw(12 * 16, 80)), Text(tokens=draw(60, 81))], "epic:k=16")
    chunks = [Chunk(tokens=draw(4 * 16, 90 + i)) for i in range(8)]
    waiting = Request([*chunks, Text(tokens=draw(5, 82))], "naive")
    expected = alone(engine, [loading, waiting])
    stuck = Stuck()
    stuck.released.set()
    with using_tiers(engine, stuck):
        results(engine, submit(engine, loading))
        engine.reset(tiers=False)
        results(engine, submit(engine, Request([*chunks[:7], Text(tokens=draw(5, 83))], "naive")))
        stuck.released.clear()
        tags = submit(engine, loading)
        for _ in range(4):
            engine.step()
        tags += submit(engine, waiting)
        for _ in range(4):
            engine.step()
        stuck.released.set()
        found = results(engine, tags)
    assert [result.tokens for result in found] == expected
    engine.reset()


def test_a_chunk_that_begins_like_another_is_copied_with_it(engine: Engine, draw: Any) -> None:
    """The tier refuses the longer one, whose pages in the pool are all that the shorter one has."""
    longer = Chunk(tokens=draw(8 * 16, 110))
    shorter = Chunk(tokens=longer.tokens[:32])
    both = Request([longer, shorter, Text(tokens=draw(5, 111))], "epic:k=4")
    expected = alone(engine, [both])
    far = Far(capacity=4 * engine.describe()["block_bytes"])
    with using_tiers(engine, far):
        for chunk in (shorter, longer):
            results(engine, submit(engine, Request([chunk, Text(tokens=draw(5, 112))], "epic:k=4")))
        assert held(far)[0] == 1
        submit(engine, both)
        # Nothing is compiled or loaded: the prompt and the second token take a step each.
        [found] = [result for _ in range(9) for result in engine.step().values()]
    assert found.tokens == expected[0]
    assert found.hits.copied
    assert not found.hits.tiers
    engine.reset()


def test_a_prompt_of_several_steps_is_not_preempted_for_a_waiting_request(
    engine: Engine, draw: Any
) -> None:
    """The next request has 7 of its 8 chunks in the pool, and references them while it waits.

    The running one needs 18 blocks, of which the references leave 12. Preempted, it would start
    over, find the same ones referenced in the second step, and be preempted again, for ever.
    """
    running = Request([Text(tokens=draw(18 * 16, 120))], "full")
    chunks = [Chunk(tokens=draw(4 * 16, 130 + i)) for i in range(8)]
    waiting = Request([*chunks, Text(tokens=draw(5, 121))], "naive")
    expected = alone(engine, [running, waiting])
    results(engine, submit(engine, Request([*chunks[:7], Text(tokens=draw(5, 122))], "naive")))
    before = engine.preemptions
    tags = submit(engine, running)
    engine.step()
    tags += submit(engine, waiting)
    ended = [result for _ in range(9) for result in engine.step().items()]
    assert engine.preemptions == before
    assert [(tag, result.tokens) for tag, result in ended] == [(tags[0], expected[0])]
    assert results(engine, tags[1:])[0].tokens == expected[1]
    engine.reset()
