"""Requests that bring their replies, beside others."""

from dataclasses import replace
from pathlib import Path

import pytest
from small_engine import check_drained, small_config

from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, Request, Text
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
