"""HijackKV (arXiv 2607.19957): KV computed in an attacker's context must not serve anyone else.

The attack needs KV that was computed after the attacker's text to be stored under the tokens of a
document alone. Chunks are compiled without the prompt, and what they are compiled after (an anchor,
the text of a document) is part of their keys.
"""

from dataclasses import replace
from typing import Any

import pytest

from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, Request, Text

ALGORITHMS = ("mepic", "naive", "epic:k=4", "cacheblend:r=0.3")


def served(engine: Engine, *requests: Request) -> list[Any]:
    found = engine.generate(requests, max_tokens=4, logprobs=4, ignore_eos=True)
    return [(result.tokens, result.logprobs) for result in found]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_attacker_before_changes_no_answer_and_no_kv(engine, tokens, algorithm):
    """Whether the attack is a text, a chunk, or both; the victim gets what it gets without it."""
    victim, attack = Chunk(tokens=tokens(90, 1)), tokens(60, 2)
    asks = Request([Text(tokens=tokens(9, 3)), victim, Text(tokens=tokens(19, 4))], algorithm)
    engine.reset()
    expected = served(engine, asks)
    digests = engine.cache.digests([victim])
    question = Text(tokens=tokens(7, 5))
    for before in ([Text(tokens=attack)], [Chunk(tokens=attack)], [Text(tokens=attack), victim]):
        engine.reset()
        served(engine, Request([*before, victim, question], algorithm))
        assert engine.cache.digests([victim]) in (digests, [None])
        assert served(engine, asks) == expected


def test_a_forged_document_is_another_chunk(engine, tokens):
    """With ``context=document`` an attacker may name any text as the victim's document."""
    chunk, forged, true = tokens(64, 1), tokens(40, 2), tokens(40, 3)
    question = Text(tokens=tokens(19, 4))

    def asks(*document: tuple[int, ...]) -> Request:
        segment = Chunk(tokens=chunk, document=document[0] + chunk if document else None)
        return Request([segment, question], "naive:context=document")

    engine.reset()
    expected = served(engine, asks(true))
    engine.reset()
    served(engine, asks(forged), asks())
    found = engine.generate([asks(true)], max_tokens=4, logprobs=4, ignore_eos=True)
    assert not found[0].counts.reused
    assert [(result.tokens, result.logprobs) for result in found] == expected


def test_anchors_are_the_engines_or_the_prompts_own(engine, tokens):
    """What is before all chunks may be their anchor: only those who send the same text share KV."""
    chunk, question = Chunk(tokens=tokens(64, 1)), Text(tokens=tokens(19, 2))
    attacker, victim = (Text(tokens=tokens(48, key)) for key in (3, 4))
    asks = Request([victim, chunk, question], "naive:anchor=head")
    engine.reset()
    expected = served(engine, asks)
    engine.reset()
    served(engine, Request([attacker, chunk, question], "naive:anchor=head"))
    (found,) = engine.generate([asks], max_tokens=4, logprobs=4, ignore_eos=True)
    assert found.counts.compiled >= 64
    assert [(found.tokens, found.logprobs)] == expected


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_another_tenant_is_served_nothing_of_it(engine, tokens, algorithm):
    chunk, question = Chunk(tokens=tokens(64, 1)), Text(tokens=tokens(19, 2))
    asks = Request([chunk, question], algorithm, salt="victim")
    engine.reset()
    served(engine, replace(asks, salt="attacker"), replace(asks, salt=None))
    (found,) = engine.generate([asks], max_tokens=1)
    assert not found.counts.reused
