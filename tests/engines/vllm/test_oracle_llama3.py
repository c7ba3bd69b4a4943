"""The engine against the oracle: llama3 rope scaling and heads of 128, prompts in one step."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_engine import small_config

from picbench.engines.engine import Engine
from picbench.engines.oracle import Blend, Oracle, Rule, epic, epic_zero, full, mepic, naive
from picbench.engines.request import Chunk, Request, Text

TOLERANCE = 1e-3
APART = 0.1

REUSING: dict[str, Rule | Blend] = {
    "naive": naive(),
    "naive:anchor=head": naive().anchored(),
    "epic:k=0": epic_zero(1),
    "epic:k=16": epic(16),
    "cacheblend:r=0.15": Blend(0.15),
    "mepic": mepic(),
    "mepic:pad=paper": mepic().padded(0),
}


@pytest.fixture(scope="module", params=[False, True], ids=["default", "keys without RoPE"])
def engine(llama3: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(
        small_config(llama3, 1000, 1024, batch_tokens=2048, keys_without_rope=request.param)
    ) as engine:
        yield engine


@pytest.mark.parametrize("order", ["AB", "BA", "CBA", "ABA"])
@pytest.mark.parametrize("algorithm", ["full", "prefix", *REUSING])
def test_orders(
    engine: Engine, oracle3: Oracle, draw: Any, deviation: Any, algorithm: str, order: str
) -> None:
    chunks = {name: Chunk(tokens=draw(n, n)) for name, n in (("A", 150), ("B", 17), ("C", 64))}
    segments = [Text(tokens=draw(20, 1)), *(chunks[c] for c in order), Text(tokens=draw(9, 2))]
    request = Request(segments, algorithm=algorithm)
    for _ in range(2):
        [result] = engine.generate([request], max_tokens=6, logprobs=8, ignore_eos=True)
        rule = REUSING.get(algorithm, full())
        assert deviation(oracle3, rule, request, result) < TOLERANCE
    if algorithm in REUSING:
        assert deviation(oracle3, full(), request, result) > APART
