"""The engine against the oracle while a small pool forces preemption."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_engine import small_config

from picbench.engines.engine import Engine
from picbench.engines.oracle import Blend, Oracle, Rule, epic, full, mepic, naive
from picbench.engines.request import Chunk, Request, Text

TOLERANCE = 1e-3

RULES: dict[str, Rule | Blend] = {
    "full": full(),
    "naive": naive(),
    "naive:anchor=head": naive().anchored(),
    "epic:k=16": epic(16),
    "cacheblend:r=0.2": Blend(0.2),
    "mepic": mepic(),
    "mepic:pad=paper": mepic().padded(0),
}


@pytest.fixture(scope="module")
def engine(llama: Path) -> Iterator[Engine]:
    with Engine(small_config(llama, 40, 512, batch_tokens=64, max_requests=8)) as engine:
        yield engine


def requests_of(draw: Any, algorithms: list[str]) -> list[Request]:
    """Eight requests of about nine blocks each, which grow by four while they generate."""
    a, b = Chunk(tokens=draw(50, 1)), Chunk(tokens=draw(37, 2))
    return [
        Request(
            [
                Text(tokens=draw(6, 3)),
                *((a, b) if i % 2 else (b, a)),
                Text(tokens=draw(40, 10 + i)),
            ],
            algorithm=algorithms[i % len(algorithms)],
        )
        for i in range(8)
    ]


@pytest.mark.parametrize("algorithms", [[name] for name in RULES] + [list(RULES)], ids=":".join)
def test_preempted_requests_answer_the_same(
    engine: Engine, oracle: Oracle, draw: Any, deviation: Any, algorithms: list[str]
) -> None:
    requests = requests_of(draw, algorithms)
    before = engine.preemptions
    results = engine.generate(requests, max_tokens=60, logprobs=5, ignore_eos=True)
    assert engine.preemptions > before
    for request, result in zip(requests, results, strict=True):
        assert request.algorithm is not None
        assert deviation(oracle, RULES[request.algorithm], request, result) < TOLERANCE
