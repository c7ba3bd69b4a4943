"""CacheBlend: the tokens that the engine picks are the oracle's, and so are its answers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.oracle import Blend, GivenSegment, Oracle, epic, full, mepic
from picbench.engines.request import Chunk, PromptSegment, Request, Text
from picbench.engines.vllm.worker.token_picker import TokenPicker

TOLERANCE = 1e-3
APART = 0.1
RULES: dict[str, Any] = {
    "cacheblend:r=0.15": Blend(0.15),
    "cacheblend:r=0.15:deviation=k": Blend(0.15, "k"),
    "cacheblend:r=0.4": Blend(0.4),
    "mepic": mepic(),
    "epic:k=16": epic(16),
    "prefix": full(),
}


@pytest.fixture(scope="module")
def engine(llama: Path) -> Iterator[Engine]:
    config = EngineConfig(
        model=str(llama),
        dtype="float32",
        kv_blocks=90,
        context=512,
        batch_tokens=64,
        max_requests=8,
    )
    with Engine(config) as engine:
        yield engine


def as_oracle(request: Request) -> list[GivenSegment]:
    return [("chunk" if isinstance(s, Chunk) else "text", s.tokens or ()) for s in request.segments]


def serve(engine: Engine, *requests: Request, tokens: int = 4) -> list[Any]:
    return engine.generate(requests, max_tokens=tokens, logprobs=8, ignore_eos=True)


def prompts(draw: Any) -> dict[str, list[PromptSegment]]:
    a, b, c = (Chunk(tokens=draw(count, count)) for count in (50, 37, 70))
    head, question = Text(tokens=draw(21, 1)), Text(tokens=draw(9, 2))
    return {
        "text before": [head, a, b, c, question],
        "chunks first": [b, c, question],
        "text between": [head, a, Text(tokens=draw(5, 3)), b, question],
        "the same chunk twice": [head, b, a, b, question],
        "no question": [head, a, b],
    }


@pytest.mark.parametrize("options", ["r=0.15", "r=0.15:deviation=k"])
def test_what_is_picked_is_what_the_oracle_picks(
    engine: Engine, oracle: Oracle, draw: Any, deviation: Any, options: str
) -> None:
    spec = f"cacheblend:{options}"
    requests = [Request(segments, algorithm=spec) for segments in prompts(draw).values()]
    engine.note_picks()
    results = engine.generate(requests, max_tokens=4, logprobs=8, ignore_eos=True, concurrency=1)
    for request, result, picked in zip(requests, results, engine.noted_picks, strict=True):
        rule = RULES[spec]
        assert set(picked) == oracle.picked(as_oracle(request), rule)
        assert deviation(oracle, rule.replay(picked), request, result) < TOLERANCE
        assert deviation(oracle, full(), request, result) > APART
        ends = isinstance(request.segments[-1], Chunk)
        assert result.counts.linked == len(picked) + ends
        assert result.counts.reused + result.counts.linked == sum(
            len(s.tokens or ()) for s in request.segments if isinstance(s, Chunk)
        )


def test_everything_picked_is_full_recompute_and_nothing_is_not_naive(
    engine: Engine, oracle: Oracle, draw: Any, deviation: Any
) -> None:
    """With r = 0 the first layers are still those of the prompt."""
    segments = prompts(draw)["text before"]
    every, none = (Request(segments, algorithm=f"cacheblend:r={r}") for r in (1, 0))
    naive = Request(segments, algorithm="naive")
    results = serve(engine, every, none, naive)
    assert deviation(oracle, full(), every, results[0]) < TOLERANCE
    assert deviation(oracle, Blend(0), none, results[1]) < TOLERANCE
    assert deviation(oracle, Blend(0), naive, results[2]) > APART


def test_a_mixed_batch_that_is_short_of_blocks(
    engine: Engine, oracle: Oracle, draw: Any, deviation: Any
) -> None:
    """Picked again after they lost their blocks, beside other algorithms and prefix hits."""
    requests = [
        Request([*segments, Text(tokens=draw(3, i))], algorithm=spec)
        for i, spec in enumerate(RULES)
        for segments in prompts(draw).values()
    ]
    before = engine.preemptions
    results = serve(engine, *requests, tokens=60)
    assert engine.preemptions > before
    for request, result in zip(requests, results, strict=True):
        rule = RULES[str(request.algorithm)]
        assert deviation(oracle, rule, request, result) < TOLERANCE, request.algorithm


def test_chunks_that_others_share_stay_as_they_are(
    engine: Engine, oracle: Oracle, draw: Any, deviation: Any
) -> None:
    """The first layers are replaced in copies only."""
    segments = prompts(draw)["text before"]
    mepic_before, _, mepic_after = (
        serve(engine, Request(segments, algorithm=spec))[0]
        for spec in ("mepic", "cacheblend:r=0.4", "mepic")
    )
    assert mepic_after.tokens == mepic_before.tokens
    request = Request(segments, algorithm="mepic")
    assert deviation(oracle, mepic(), request, mepic_after) < TOLERANCE


def test_a_fault_while_picking_ends_that_request(
    engine: Engine, oracle: Oracle, draw: Any, deviation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(TokenPicker, "_picked", fail)
    segments = prompts(draw)["chunks first"]
    bad, good = Request(segments, algorithm="cacheblend"), Request(segments, algorithm="mepic")
    results = serve(engine, bad, good)
    assert "picbench failed to pick tokens: RuntimeError: out of memory" in str(results[0].error)
    assert deviation(oracle, mepic(), good, results[1]) < TOLERANCE
