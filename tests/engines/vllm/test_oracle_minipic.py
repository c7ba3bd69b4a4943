"""MiniPIC's primitives in a running engine: held to the oracle, and to the algorithms they make."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_engine import small_config

from picbench.engines.engine import Engine
from picbench.engines.oracle import Oracle, OracleSegment, Rule, epic, full, mepic, naive
from picbench.engines.request import Chunk, PromptSegment, Request, Result, Text
from picbench.errors import ConfigError

TOLERANCE = 1e-3
APART = 0.1
SSEP, PDEP, PAD = 1, 2, 0  # Ids that random tokens do not have.
TOKENS = "minipic:ssep=1:pdep=2"


def minipic(ssep: int, pdep: int, *, joined: bool = False) -> Rule:
    """A prompt of one text that says by separators what is compiled alone (2606.13126).

    From a token `ssep` up to the next separator it is a chunk, otherwise text. If `joined`, a chunk
    begins with the text from `pdep` on that is right before it, and that text is recomputed.
    """

    def frame(prompt: Sequence[OracleSegment]) -> list[OracleSegment]:
        parts: list[list[int]] = [[]]
        for token in (token for segment in prompt for token in segment.tokens):
            if token in (ssep, pdep):
                parts.append([])
            parts[-1].append(token)
        framed: list[OracleSegment] = []
        lead: list[int] = []
        for part in parts:
            if joined and part[:1] == [pdep] and part is not parts[-1]:
                framed += [OracleSegment("text", lead)]
                lead = part
            elif part[:1] == [ssep]:
                framed.append(OracleSegment("chunk", lead + part, dependent=range(len(lead))))
                lead = []
            else:
                framed += [OracleSegment("text", lead), OracleSegment("text", part)]
                lead = []
        return framed

    return replace(naive(), frame=frame)


@pytest.fixture(scope="module")
def engine(llama: Path) -> Iterator[Engine]:
    with Engine(small_config(llama, 600, 512, algorithm=TOKENS, batch_tokens=64)) as engine:
        yield engine


def run(engine: Engine, segments: Sequence[PromptSegment], algorithm: str | None = None) -> Result:
    request = Request(segments, algorithm)
    [result] = engine.generate([request], max_tokens=4, logprobs=8, ignore_eos=True)
    return result


def filled(*parts: int) -> tuple[int, ...]:
    return (*parts, *(PAD,) * (-len(parts) % 16))


def marked(tokens: Any, *counts: int) -> list[Text]:
    """Text, spans of so many tokens with dependent text between two of them, and a question."""
    spans = [filled(SSEP, *tokens(count, count)) for count in counts]
    between = filled(PDEP, *tokens(20, 1))
    parts = [filled(*tokens(21, 2)), spans[0], between, *spans[1:], (PDEP, *tokens(18, 3))]
    return [Text(tokens=tuple(token for part in parts for token in part))]


@pytest.mark.parametrize("spans", ["alone", "joined"])
def test_separators_in_prompts(
    engine: Engine, oracle: Oracle, deviation: Any, tokens: Any, spans: str
) -> None:
    rule = minipic(SSEP, PDEP, joined=spans == "joined")
    for prompt in (marked(tokens, 90, 35), marked(tokens, 35, 16, 90)):
        for algorithm in (f"{TOKENS}:spans={spans}", f"{TOKENS}:spans={spans}"):
            result = run(engine, prompt, algorithm)
            assert deviation(oracle, rule, Request(prompt), result) < TOLERANCE
        assert result.counts.compile_work == 0 < result.hits.chunk
        assert deviation(oracle, full(), Request(prompt), result) > APART


def test_every_prompt_of_an_engine_with_separators_is_read(
    engine: Engine, oracle: Oracle, deviation: Any, tokens: Any
) -> None:
    prompt = marked(tokens, 50, 50)
    result = run(engine, prompt)
    assert result.counts.compile_work > 0
    reply, cached = _plain(engine, prompt)
    assert reply == result.tokens
    assert cached >= result.hits.chunk * 16
    plain = [Text(tokens=tokens(60))]
    result = run(engine, plain)
    assert deviation(oracle, full(), Request(plain), result) < TOLERANCE
    assert result.counts.compile_work == result.hits.chunk == 0


def _plain(engine: Engine, prompt: Sequence[PromptSegment]) -> tuple[Any, Any]:
    """Reply and cached tokens of a request without any argument of picbench."""
    from vllm import SamplingParams

    running = engine._running.engine
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    given: Any = {"prompt_token_ids": list(prompt[0].tokens or ())}
    running.add_request("plain", given, params)
    finished: list[Any] = []
    while not finished:
        finished = [output for output in running.step() if output.finished]
    return tuple(finished[0].outputs[0].token_ids), finished[0].num_cached_tokens


def test_dependent_tokens_are_recomputed(
    engine: Engine, oracle: Oracle, deviation: Any, tokens: Any
) -> None:
    a = Chunk(tokens=tokens(50, 1), dependent=((0, 3), (20, 21)))
    segments = [Text(tokens=tokens(9, 2)), a, replace(a, dependent=((49, 50),)), a]
    for algorithm, rule in (("minipic", naive()), ("mepic", mepic()), ("epic:k=4", epic(4))):
        for _ in range(2):
            result = run(engine, segments, algorithm)
            request = Request(segments, algorithm)
            assert deviation(oracle, rule, request, result) < TOLERANCE
        without = [replace(s, dependent=()) if isinstance(s, Chunk) else s for s in segments]
        assert deviation(oracle, rule, Request(without), result) > TOLERANCE


def test_algorithms_that_primitives_make(engine: Engine, tokens: Any) -> None:
    head, question = Text(tokens=tokens(20, 1)), Text(tokens=tokens(19, 2))
    chunks = [Chunk(tokens=tokens(count, count)) for count in (70, 35, 20)]
    linked = [replace(c, dependent=((0, 16),)) if i else c for i, c in enumerate(chunks)]
    apart = [replace(c, position=100 * i + 50) for i, c in enumerate(chunks)]
    for algorithm, ours, theirs in (
        ("block-attention", chunks, chunks),
        ("epic:k=16", linked, chunks),
        ("prompt-cache", apart, apart),
    ):
        one = run(engine, [head, *ours, question], "minipic")
        other = run(engine, [head, *theirs, question], algorithm)
        assert one.tokens == other.tokens
        for mine, others in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert mine == pytest.approx(others, abs=TOLERANCE)


def test_what_follows_another_first_span_is_computed_anew(
    engine: Engine, oracle: Oracle, deviation: Any, tokens: Any
) -> None:
    question = (PDEP, *tokens(40, 9))
    for key in (1, 2):
        spans = filled(SSEP, *tokens(30, key)) + filled(SSEP, *tokens(40, 3))
        prompt = [Text(tokens=spans + question)]
        result = run(engine, prompt)
        assert deviation(oracle, minipic(SSEP, PDEP), Request(prompt), result) < TOLERANCE
        assert result.hits.prefix == 0
    assert result.counts.compile_work == 32


def test_bad_primitives_are_refused(engine: Engine, tokens: Any) -> None:
    inside = [Text(tokens=(*tokens(20), SSEP, *tokens(20)))]
    partly = [Chunk(tokens=tokens(20), dependent=((10, 30),)), Text(tokens=tokens(20))]
    for segments, algorithm, message in (
        (inside, TOKENS, "prompt token 20, ssep=1, is inside a block of 16 tokens"),
        (inside, None, "prompt token 20, ssep=1, is inside a block of 16 tokens"),
        (inside, "minipic:ssep=4000000", "reads token 4000000, the model has"),
        (partly, "minipic", "is partly inside the chunk"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(engine, segments, algorithm)
