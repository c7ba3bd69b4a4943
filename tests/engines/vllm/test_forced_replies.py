"""Requests that bring their replies, beside others."""

from dataclasses import replace
from pathlib import Path

import pytest
from small_engine import check_drained, small_config

from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, Request, Text
from picbench.engines.vllm.device import CPU, find
from picbench.errors import ConfigError

DOCUMENT = Chunk(tokens=tuple(range(3, 83)))
OTHER = Chunk(tokens=tuple(range(40, 90)))
QUESTIONS = [Text(tokens=tuple(range(n, n + 7))) for n in (10, 30, 50)]
REQUESTS = [Request([DOCUMENT, OTHER, question], max_tokens=5) for question in QUESTIONS]
REPLY = (9, 2, 7, 2, 11)


@pytest.mark.parametrize("algorithm", ["prefix", "mepic"])
def test_replies_of_others_stay(llama: Path, algorithm: str) -> None:
    stock = algorithm == "prefix"
    config = small_config(llama, 200, 256, algorithm=algorithm, stock=stock, forced_replies=True)
    with Engine(config) as engine:
        engine.generate(REQUESTS)
        alone = engine.generate(REQUESTS, logprobs=2, ignore_eos=True)
        mixed = [REQUESTS[0], replace(REQUESTS[1], reply=REPLY, logprobs=3), REQUESTS[2]]
        first, forced, last = engine.generate(mixed, logprobs=2, ignore_eos=True)
        if not stock:
            check_drained(engine)
    assert forced.tokens == REPLY  # The end of text (2) does not end it.
    assert forced.logprobs is not None and alone[1].logprobs is not None
    for step, token in zip(forced.logprobs, REPLY, strict=True):
        assert token in step and len(step) in (3, 4)
    # Before the first token nothing was forced.
    for token, known in alone[1].logprobs[0].items():
        assert forced.logprobs[0].get(token, known) == pytest.approx(known, abs=1e-4)
    assert (forced.counts, forced.hits) == (alone[1].counts, alone[1].hits)
    for before, beside in ((alone[0], first), (alone[2], last)):
        assert (before.tokens, before.counts, before.hits) == (
            beside.tokens,
            beside.counts,
            beside.hits,
        )


def test_full_recompute_finds_nothing_unless_a_prompt_comes_again_with_a_reply(llama: Path) -> None:
    """On a GPU nothing is cached at all."""
    cached = find("auto") is CPU
    config = small_config(llama, 200, 256, algorithm="full", stock=True, forced_replies=True)
    with Engine(config) as engine:
        alone = engine.generate(REQUESTS, logprobs=2, ignore_eos=True)
        engine.measure()
        again = engine.generate([*REQUESTS, *REQUESTS], logprobs=2, ignore_eos=True)
        assert {result.counts.reused for result in [*alone, *again]} == {0}
        assert [result.tokens for result in again] == [result.tokens for result in alone] * 2
        assert all(not step.blocks["prefix_idle"] for step in engine.memory)
        asked = [replace(r, reply=REPLY, logprobs=2) for r in REQUESTS]
        forced = engine.generate(asked)
        assert {result.counts.reused for result in forced} == ({128} if cached else {0})
        engine.reset()
        cold = engine.generate(asked)
        # Nothing that others could use is lost.
        engine.generate([Request([Text(tokens=tuple(range(3, 203)))])] * 40)
        assert engine.evictions == {"chunk": 0, "prefix": 0}
    for found, computed in zip(forced, cold, strict=True):
        assert found.logprobs is not None and computed.logprobs is not None
        for step, other, token in zip(found.logprobs, computed.logprobs, REPLY, strict=True):
            assert step[token] == pytest.approx(other[token], abs=1e-4)


def test_wrong_replies_are_refused(llama: Path) -> None:
    with (
        Engine(small_config(llama, 64, 128)) as engine,
        pytest.raises(ConfigError, match="forced_replies=True"),
    ):
        engine.generate([replace(REQUESTS[0], reply=REPLY)])
    with Engine(small_config(llama, 64, 256, forced_replies=True)) as engine:
        for reply, named in (((), "no token"), ((10**6,), "not in the vocabulary")):
            with pytest.raises(ConfigError, match=named):
                engine.generate([replace(REQUESTS[0], reply=reply)])
        with pytest.raises(ConfigError, match="exceed the context"):
            engine.generate([replace(REQUESTS[0], reply=(5,) * 200)])
