"""What the tests of algorithms that pick tokens share: forms of prompts, and a starved pool."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from picbench.engines.engine import Engine
from picbench.engines.oracle.rule import expand
from picbench.engines.request import Chunk, PromptSegment, Request, Result, Text
from picbench.experiments.oracle import as_oracle

#: Differences in log-probability: of the right answer at most, and of an answer by another rule.
TOLERANCE, APART = 1e-3, 0.1


def forms(draw: Any, a: Chunk, b: Chunk, c: Chunk) -> dict[str, list[PromptSegment]]:
    """Prompts of every form over three chunks."""
    head, question = Text(tokens=draw(21, 1)), Text(tokens=draw(9, 2))
    return {
        "text before": [head, a, b, c, question],
        "chunks first": [b, c, question],
        "text between": [head, a, Text(tokens=draw(5, 3)), b, question],
        "the same chunk twice": [head, b, a, b, question],
        "no question": [head, a, b],
        "a long text": [head, c, Text(tokens=draw(90, 4))],
    }


def serve(engine: Engine, *requests: Request, tokens: int = 4, **options: Any) -> list[Result]:
    return engine.generate(requests, max_tokens=tokens, logprobs=8, ignore_eos=True, **options)


def serve_picked(
    engine: Engine, requests: Sequence[Request]
) -> list[tuple[Result, tuple[int, ...]]]:
    """Results and what was picked, one request after the other."""
    engine.note_picks()
    results = serve(engine, *requests, concurrency=1)
    return list(zip(results, engine.noted_picks, strict=True))


def require_right(
    oracle: Any, deviation: Any, request: Request, reply: tuple[Result, tuple[int, ...]], rule: Any
) -> None:
    """The oracle picks the same tokens, and its answer with them is the engine's."""
    result, picked = reply
    assert set(picked) == oracle.picked(as_oracle(request.segments, 0), rule)
    assert deviation(oracle, replace(rule, picked=picked), request, result) < TOLERANCE
    rows = expand(as_oracle(request.segments, 0), (), rule.compiled)
    known = sum(row.compiled is None for row in rows)  # Text, and what is linked in any case.
    texts = sum(len(s.tokens or ()) for s in request.segments if isinstance(s, Text))
    assert result.counts.linked == len(picked) + known - texts


def chunk_lengths(request: Request) -> list[int]:
    return [len(s.tokens or ()) for s in request.segments if isinstance(s, Chunk)]


def require_right_when_starved(
    engine: Engine,
    oracle: Any,
    deviation: Any,
    rules: Mapping[str, Any],
    requests: Sequence[Request],
) -> None:
    """Requests that lose their blocks to each other get the oracle's answers all the same."""
    before = engine.preemptions
    results = serve(engine, *requests, tokens=60)
    assert engine.preemptions > before
    for request, result in zip(requests, results, strict=True):
        rule = rules[str(request.algorithm)]
        assert deviation(oracle, rule, request, result) < TOLERANCE, request.algorithm
