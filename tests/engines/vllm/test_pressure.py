"""Many requests over few blocks: eviction, preemption and recompilation change no output."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from small_engine import check_drained, small_config

from picbench.engines.engine import Engine
from picbench.engines.ledger import KINDS
from picbench.engines.request import Chunk, Request, Result, Text

CHUNKS = 100
REQUESTS = 1000
ALGORITHMS = [
    "mepic",
    "naive",
    "epic:k=4",
    "epic:k=16",
    "epic:k=16:copy=shared",
    "cacheblend:r=0.15",
    "mepic:anchor=head",
    "naive:anchor=passage",
    "prefix",
    "full",
]


def workload(draw) -> list[Request]:
    """Requests over a hundred chunks, some twice in a prompt, some without any."""
    dice = random.Random(7)
    chunks = [Chunk(tokens=draw(dice.randint(1, 50), 500 + i)) for i in range(CHUNKS)]
    system = Text(tokens=draw(21, 499))
    requests = []
    for index in range(REQUESTS):
        picked = dice.choices(chunks, k=dice.randint(0, 4))
        question = Text(tokens=draw(dice.randint(1, 20), 1000 + index))
        requests.append(Request([system, *picked, question], algorithm=dice.choice(ALGORITHMS)))
    return requests


def serve(model: Path, kv_blocks: int, requests: Sequence[Request]) -> tuple[Engine, list[Result]]:
    engine = Engine(small_config(model, kv_blocks, 256, batch_tokens=192, max_requests=16))
    return engine, engine.generate(requests, max_tokens=8, ignore_eos=True, concurrency=24)


@pytest.fixture(scope="module")
def requests(draw) -> list[Request]:
    return workload(draw)


def test_a_small_pool_gives_the_outputs_of_a_big_one(llama, requests):
    big, expected = serve(llama, 4000, requests)
    assert big.preemptions == 0
    big.close()
    small, found = serve(llama, 60, requests)
    assert small.preemptions > 0
    assert [r.tokens for r in found] == [r.tokens for r in expected]
    few, many = (sum(r.counts.compile_work for r in results) for results in (expected, found))
    assert many > few
    check_ledger(small)
    check_drained(small)
    small.reset()
    small.close()


def check_ledger(engine: Engine) -> None:
    """The counts of every step sum to the pool, and every kind of slot occurred."""
    assert all(sum(s.blocks.values()) == s.pool for s in engine.memory)
    for kind in KINDS[1:]:
        assert any(s.blocks[kind] for s in engine.memory), kind
