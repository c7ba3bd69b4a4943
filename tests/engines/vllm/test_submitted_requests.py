"""Requests that a caller submits step by step, beside calls that run steps of their own."""

from collections.abc import Callable
from typing import Any

import pytest

from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, Request, Result, Text
from picbench.errors import ConfigError, EngineError


@pytest.fixture
def asked(draw: Any, chunks: list[Chunk]) -> list[Request]:
    """Three short requests, and one that takes longer than all of them."""
    return [
        Request([*chunks, Text(tokens=draw(9, 900 + i))], "mepic", max_tokens=2 + 8 * (i == 3))
        for i in range(4)
    ]


def served(engine: Engine, request: Request) -> Result:
    (result,) = engine.generate([request], ignore_eos=True)
    return result


def ended(engine: Engine, tags: list[str]) -> list[tuple[int, ...]]:
    """The answers to requests that were submitted, from one step: all have ended before."""
    results = engine.step()
    return [results[tag].tokens for tag in tags]


BESIDE: dict[str, Callable[[Engine, Request], object]] = {
    "generate": served,
    "drain": lambda engine, request: engine.drain(),
    "warm": lambda engine, request: engine.cache.warm(
        [part for part in request.segments if isinstance(part, Chunk)]
    ),
}


@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE.keys())
def test_results_wait_for_the_next_step(
    engine: Engine, asked: list[Request], beside: Callable[[Engine, Request], object]
) -> None:
    alone = [served(engine, request).tokens for request in asked]
    engine.reset()
    tags = [engine.submit(request, ignore_eos=True) for request in asked[:3]]
    engine.step()
    found = beside(engine, asked[3])
    engine.drain()
    assert ended(engine, tags) == alone[:3]
    assert not isinstance(found, Result) or found.tokens == alone[3]
    assert engine.step() == {}
    assert engine.drained


def test_a_result_that_waits_is_dropped_by_an_abort(engine: Engine, asked: list[Request]) -> None:
    tag = engine.submit(asked[0], ignore_eos=True)
    engine.drain()
    engine.abort(tag)
    assert engine.step() == {}


def test_caches_are_not_dropped_while_requests_run(engine: Engine, asked: list[Request]) -> None:
    alone = served(engine, asked[3]).tokens
    tag = engine.submit(asked[3], ignore_eos=True)
    engine.step()
    with pytest.raises(EngineError, match="while requests run"):
        engine.reset()
    engine.drain()
    assert ended(engine, [tag]) == [alone]
    engine.reset()


@pytest.mark.parametrize("wrong", [-1, 10**6, 2**70, 1.5])
def test_ids_that_the_model_does_not_have_are_refused_before_anything_starts(
    engine: Engine, asked: list[Request], wrong: Any
) -> None:
    """They would fail the step, and with it all requests of it."""
    bad = Request([Text(tokens=(5, wrong))], "mepic")
    with pytest.raises(ConfigError, match="token id"):
        engine.generate([asked[0], bad])
    assert engine.drained


@pytest.mark.parametrize("values", [{"max_tokens": -1}, {"logprobs": -5}, {"logprobs": 10_000}])
def test_sampling_that_cannot_be_is_refused(
    engine: Engine, asked: list[Request], values: dict[str, int]
) -> None:
    request = Request(asked[0].segments, "mepic")
    with pytest.raises(ConfigError, match=next(iter(values))):
        engine.generate([request], **values)
    assert engine.drained
