"""Links of what the question attends to: the engine's picks are the oracle's, and its answers."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.oracle import Asked, Oracle, full, mepic, naive
from picbench.engines.request import Chunk, PromptSegment, Request, Text
from picbench.errors import ConfigError
from picbench.measure.engine.oracle_check import as_oracle

TOLERANCE = 1e-3
APART = 0.1
SPEC = "mepic:select=question"


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


def prompts(draw: Any) -> dict[str, list[PromptSegment]]:
    """Chunks that know their documents, in prompts of every form."""
    lead, a, b, c = (draw(count, count) for count in (30, 50, 37, 70))
    chunks = [Chunk(tokens=a), Chunk(tokens=b, document=a + b), Chunk(tokens=c, document=lead + c)]
    first, second, third = chunks
    head, question = Text(tokens=draw(21, 1)), Text(tokens=draw(9, 2))
    return {
        "text before": [head, first, second, third, question],
        "chunks first": [second, third, question],
        "text between": [head, first, Text(tokens=draw(5, 3)), second, question],
        "the same chunk twice": [head, second, first, second, question],
        "no question": [head, first, second],
        "a long text": [head, third, Text(tokens=draw(90, 4))],
    }


def contexts(segments: list[PromptSegment]) -> list[tuple[int, ...]]:
    """What stands before each chunk in its document."""
    chunks = [s for s in segments if isinstance(s, Chunk)]
    return [tuple(c.document or c.tokens or ())[: -len(c.tokens or ())] for c in chunks]


def rule_of(spec: str, segments: list[PromptSegment]) -> Asked:
    compiled = naive().anchored() if "anchored" in spec else naive()
    if "context" in spec:
        compiled = compiled.within(contexts(segments))
    return Asked(2 if "blocks" in spec else 1, compiled)


@pytest.mark.parametrize(
    "options",
    ["", ":blocks=2", ":anchored=on", ":context=document", ":anchored=on:context=document"],
)
def test_what_is_picked_is_what_the_oracle_picks(
    engine: Engine, oracle: Oracle, draw: Any, deviation: Any, options: str
) -> None:
    given = list(prompts(draw).values())
    requests = [Request(segments, algorithm=SPEC + options) for segments in given]
    for compiled in (True, False):
        engine.note_picks()
        results = engine.generate(
            requests, max_tokens=4, logprobs=8, ignore_eos=True, concurrency=1
        )
        for segments, request, result, picked in zip(
            given, requests, results, engine.noted_picks, strict=True
        ):
            rule = rule_of(options, segments)
            assert set(picked) == oracle.picked(as_oracle(segments, 0), rule)
            assert deviation(oracle, rule.replay(picked), request, result) < TOLERANCE
            if "anchored" not in options:  # After its anchor a first chunk is the prompt's own.
                assert deviation(oracle, rule.compiled, request, result) > TOLERANCE
            ends = isinstance(segments[-1], Chunk)
            assert result.counts.linked == len(picked) + ends
            lengths = [len(s.tokens or ()) for s in segments if isinstance(s, Chunk)]
            assert len(picked) == sum(min(rule.blocks * 16, length) for length in lengths)
            assert result.counts.reused + result.counts.linked >= sum(lengths)
            assert result.hits.chunk > 0 == result.hits.copied
            assert compiled or result.counts.compiled == 0


def test_a_mixed_batch_that_is_short_of_blocks(
    engine: Engine, oracle: Oracle, draw: Any, deviation: Any
) -> None:
    """Picked again after blocks were lost, and never before chunks are there."""
    engine.reset()
    rules: dict[str, Any] = {SPEC: Asked(), "mepic": mepic(), "naive": naive(), "prefix": full()}
    requests = [
        Request([*segments, Text(tokens=draw(3, i))], algorithm=spec)
        for i, spec in enumerate([*rules, SPEC])
        for segments in prompts(draw).values()
    ]
    before = engine.preemptions
    results = engine.generate(requests, max_tokens=60, logprobs=8, ignore_eos=True)
    assert engine.preemptions > before
    for request, result in zip(requests, results, strict=True):
        rule = rules[str(request.algorithm)]
        assert deviation(oracle, rule, request, result) < TOLERANCE, request.algorithm


def test_every_token_picked_is_full_recompute(
    engine: Engine, oracle: Oracle, draw: Any, deviation: Any
) -> None:
    request = Request(prompts(draw)["text before"], algorithm=f"{SPEC}:blocks=9")
    [result] = engine.generate([request], max_tokens=4, logprobs=8, ignore_eos=True)
    assert deviation(oracle, full(), request, result) < TOLERANCE


def test_another_question_picks_other_tokens_of_the_same_blocks(engine: Engine, draw: Any) -> None:
    *rest, _ = prompts(draw)["text before"]
    asked = [[*rest, Text(tokens=draw(9, key))] for key in (20, 21, 22)]
    engine.note_picks()
    engine.generate([Request(s, algorithm=SPEC) for s in asked], max_tokens=1, concurrency=1)
    assert len(set(engine.noted_picks)) > 1


def test_what_cannot_be_picked_gets_one_line(engine: Engine, draw: Any) -> None:
    chunk, question = prompts(draw)["chunks first"][1:]
    assert isinstance(chunk, Chunk)
    gap = Request([replace(chunk, position=9), question], algorithm=SPEC)
    for request, message in (
        (gap, "without gaps, pads and empty slots"),
        (Request([chunk, question], algorithm=f"{SPEC}:pad=paper"), "visible pads"),
        (Request([chunk, question], algorithm=f"{SPEC}:blocks=0"), "blocks"),
        (Request([chunk, question], algorithm="mepic:select=all"), "use first, question"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            engine.generate([request], max_tokens=1)
        assert "\n" not in str(caught.value)
