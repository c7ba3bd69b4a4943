"""Links of what the question attends to: the engine's picks are the oracle's, and its answers."""

from dataclasses import replace
from typing import Any

import pytest
from picked_tokens import (
    TOLERANCE,
    chunk_lengths,
    forms,
    require_right,
    require_right_when_starved,
    serve,
    serve_picked,
)
from small_engine import ANCHORS

from picbench.engines.engine import Engine
from picbench.engines.oracle import Asked, Oracle, full, mepic, naive
from picbench.engines.request import Chunk, PromptSegment, Request, Text
from picbench.errors import ConfigError

SPEC = "mepic:select=question"


def prompts(draw: Any) -> dict[str, list[PromptSegment]]:
    """Of chunks that know their documents."""
    lead, a, b, c = (draw(count, count) for count in (30, 50, 37, 70))
    first, second = Chunk(tokens=a), Chunk(tokens=b, document=a + b)
    return forms(draw, first, second, Chunk(tokens=c, document=lead + c))


def contexts(segments: list[PromptSegment]) -> list[tuple[int, ...]]:
    """What stands before each chunk in its document."""
    chunks = [s for s in segments if isinstance(s, Chunk)]
    return [tuple(c.document or c.tokens or ())[: -len(c.tokens or ())] for c in chunks]


def rule_of(spec: str, segments: list[PromptSegment]) -> Asked:
    _, anchored, name = spec.partition(":anchor=")
    text = ANCHORS.get(name.partition(":")[0], ())
    compiled = naive().anchored(text) if anchored else naive()
    if "context" in spec:
        compiled = compiled.within(contexts(segments))
    return Asked(2 if "blocks" in spec else 1, compiled)


@pytest.mark.parametrize(
    "options",
    [
        *("", ":blocks=2", ":anchor=head", ":context=document", ":anchor=head:context=document"),
        *(":anchor=passage", ":blocks=2:anchor=./other.txt:context=document"),
    ],
)
def test_what_is_picked_is_what_the_oracle_picks(
    starved: Engine, oracle: Oracle, draw: Any, deviation: Any, options: str
) -> None:
    given = list(prompts(draw).values())
    requests = [Request(segments, algorithm=SPEC + options) for segments in given]
    for compiled in (True, False):
        replies = serve_picked(starved, requests)
        for segments, request, reply in zip(given, requests, replies, strict=True):
            rule = rule_of(options, segments)
            require_right(oracle, deviation, request, reply, rule)
            result, picked = reply
            if "anchor" not in options:  # After its anchor a first chunk is the prompt's own.
                assert deviation(oracle, rule.compiled, request, result) > TOLERANCE
            lengths = chunk_lengths(request)
            assert len(picked) == sum(min(rule.blocks * 16, length) for length in lengths)
            counts = result.counts
            assert counts.reused + counts.compiled + counts.linked >= sum(lengths)
            assert result.hits.chunk > 0 == result.hits.copied
            assert compiled or counts.compile_work == 0


@pytest.mark.parametrize(
    ("options", "share"),
    [("r=0.2", 0.2), ("r=0.35:copy=shared:context=document", 0.35), ("r=0.1:anchor=passage", 0.1)],
)
def test_tokens_by_their_own_attention(
    starved: Engine, oracle: Oracle, draw: Any, deviation: Any, options: str, share: float
) -> None:
    given = list(prompts(draw).values())
    requests = [Request(segments, algorithm=f"prophetkv:{options}") for segments in given]
    for private in (True, False):
        replies = serve_picked(starved, requests)
        for segments, request, reply in zip(given, requests, replies, strict=True):
            rule = replace(rule_of(f":{options}", segments), share=share)
            require_right(oracle, deviation, request, reply, rule)
            assert len(reply[1]) == int(round(share * sum(chunk_lengths(request)), 6))
            assert (reply[0].hits.copied > 0) == ("shared" not in options)
        assert private or all(result.counts.compile_work == 0 for result, _ in replies)


def test_a_share_of_nothing_is_naive(
    starved: Engine, oracle: Oracle, draw: Any, deviation: Any
) -> None:
    request = Request(prompts(draw)["text before"], algorithm="prophetkv:r=0")
    [(result, picked)] = serve_picked(starved, [request])
    assert not picked
    assert deviation(oracle, naive(), request, result) < TOLERANCE


def test_a_mixed_batch_that_is_short_of_blocks(
    starved: Engine, oracle: Oracle, draw: Any, deviation: Any
) -> None:
    """Picked again after blocks were lost, and never before chunks are there."""
    starved.reset()
    rules: dict[str, Any] = {SPEC: Asked(), "mepic": mepic(), "naive": naive(), "prefix": full()}
    rules["prophetkv:r=0.2"] = Asked(share=0.2)
    requests = [
        Request([*segments, Text(tokens=draw(3, i))], algorithm=spec)
        for i, spec in enumerate([*rules, SPEC])
        for segments in prompts(draw).values()
    ]
    require_right_when_starved(starved, oracle, deviation, rules, requests)


def test_every_token_picked_is_full_recompute(
    starved: Engine, oracle: Oracle, draw: Any, deviation: Any
) -> None:
    request = Request(prompts(draw)["text before"], algorithm=f"{SPEC}:blocks=9")
    [result] = serve(starved, request)
    assert deviation(oracle, full(), request, result) < TOLERANCE


def test_another_question_picks_other_tokens_of_the_same_blocks(starved: Engine, draw: Any) -> None:
    *rest, _ = prompts(draw)["text before"]
    asked = [[*rest, Text(tokens=draw(9, key))] for key in (20, 21, 22)]
    replies = serve_picked(starved, [Request(s, algorithm=SPEC) for s in asked])
    assert len({picked for _, picked in replies}) > 1


def test_what_cannot_be_picked_gets_one_line(starved: Engine, draw: Any) -> None:
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
            starved.generate([request], max_tokens=1)
        assert "\n" not in str(caught.value)
