"""CacheBlend: the tokens that the engine picks are the oracle's, and so are its answers."""

from typing import Any

import pytest
from picked_tokens import (
    APART,
    TOLERANCE,
    chunk_lengths,
    forms,
    require_right,
    require_right_when_starved,
    serve,
    serve_picked,
)

from picbench.engines.engine import Engine
from picbench.engines.oracle import Blend, Oracle, epic, full, mepic
from picbench.engines.request import Chunk, PromptSegment, Request, Text
from picbench.engines.vllm.worker.token_picker import TokenPicker

RULES: dict[str, Any] = {
    "cacheblend:r=0.15": Blend(0.15),
    "cacheblend:r=0.15:deviation=k": Blend(0.15, "k"),
    "cacheblend:r=0.4": Blend(0.4),
    "mepic": mepic(),
    "epic:k=16": epic(16),
    "prefix": full(),
}


def prompts(draw: Any) -> dict[str, list[PromptSegment]]:
    return forms(draw, *(Chunk(tokens=draw(count, count)) for count in (50, 37, 70)))


@pytest.mark.parametrize("options", ["r=0.15", "r=0.15:deviation=k"])
def test_what_is_picked_is_what_the_oracle_picks(
    starved: Engine, oracle: Oracle, draw: Any, deviation: Any, options: str
) -> None:
    spec = f"cacheblend:{options}"
    requests = [Request(segments, algorithm=spec) for segments in prompts(draw).values()]
    rule = RULES[spec]
    for request, reply in zip(requests, serve_picked(starved, requests), strict=True):
        require_right(oracle, deviation, request, reply, rule)
        result, _ = reply
        counts = result.counts
        assert deviation(oracle, full(), request, result) > APART
        parts = counts.reused + counts.compiled + counts.linked
        assert parts == sum(chunk_lengths(request))


def test_everything_picked_is_full_recompute_and_nothing_is_not_naive(
    starved: Engine, oracle: Oracle, draw: Any, deviation: Any
) -> None:
    """With r = 0 the first layers are still those of the prompt."""
    segments = prompts(draw)["text before"]
    every, none = (Request(segments, algorithm=f"cacheblend:r={r}") for r in (1, 0))
    naive = Request(segments, algorithm="naive")
    results = serve(starved, every, none, naive)
    assert deviation(oracle, full(), every, results[0]) < TOLERANCE
    assert deviation(oracle, Blend(0), none, results[1]) < TOLERANCE
    assert deviation(oracle, Blend(0), naive, results[2]) > APART


def test_a_mixed_batch_that_is_short_of_blocks(
    starved: Engine, oracle: Oracle, draw: Any, deviation: Any
) -> None:
    """Picked again after they lost their blocks, beside other algorithms and prefix hits."""
    requests = [
        Request([*segments, Text(tokens=draw(3, i))], algorithm=spec)
        for i, spec in enumerate(RULES)
        for segments in prompts(draw).values()
    ]
    require_right_when_starved(starved, oracle, deviation, RULES, requests)


def test_chunks_that_others_share_stay_as_they_are(
    starved: Engine, oracle: Oracle, draw: Any, deviation: Any
) -> None:
    """The first layers are replaced in copies only."""
    segments = prompts(draw)["text before"]
    mepic_before, _, mepic_after = (
        serve(starved, Request(segments, algorithm=spec))[0]
        for spec in ("mepic", "cacheblend:r=0.4", "mepic")
    )
    assert mepic_after.tokens == mepic_before.tokens
    request = Request(segments, algorithm="mepic")
    assert deviation(oracle, mepic(), request, mepic_after) < TOLERANCE


def test_a_fault_while_picking_ends_that_request(
    starved: Engine, oracle: Oracle, draw: Any, deviation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(TokenPicker, "_picked", fail)
    segments = prompts(draw)["chunks first"]
    bad, good = Request(segments, algorithm="cacheblend"), Request(segments, algorithm="mepic")
    results = serve(starved, bad, good)
    assert "picbench failed to pick tokens: RuntimeError: out of memory" in str(results[0].error)
    assert deviation(oracle, mepic(), good, results[1]) < TOLERANCE
