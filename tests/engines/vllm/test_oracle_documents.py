"""The engine against the oracle where chunks are compiled after the text of their documents."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from small_engine import small_config

from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.oracle import Oracle, Rule, epic, epic_zero, first, mepic, naive
from picbench.engines.request import Chunk, PromptSegment, Request, Text
from picbench.errors import ConfigError

TOLERANCE = 1e-3
APART = 0.1
BOS, PAD = 1, 0
CONTEXT = 512

RULES: dict[str, Rule] = {
    "naive": naive(),
    "naive:anchor=head": naive().anchored(),
    "naive:pad=paper:anchor=head": naive().anchored().padded(PAD),
    "epic:k=0": epic_zero(BOS),
    "epic:k=16": epic(16),
    "epic:k=16:anchor=head": epic(16).anchored(),
    "epic:k=4:copy=shared": epic(4),
    "cacheblend:select=first": first(0.15),
    "mepic": mepic(),
    "mepic:anchor=head": mepic().anchored(),
    "mepic:pad=paper": mepic().padded(PAD),
}


@pytest.fixture(scope="module")
def engine(llama: Path) -> Iterator[Engine]:
    with Engine(small_config(llama, 600, CONTEXT, batch_tokens=64)) as engine:
        yield engine


def before(chunk: Chunk) -> tuple[int, ...]:
    """What stands before a chunk in its document; random tokens have one place."""
    own, document = chunk.tokens or (), chunk.document or ()
    assert isinstance(document, tuple)
    places = [i for i in range(len(document)) if document[i : i + len(own)] == own]
    return document[: places[0]] if places else ()


def run(engine: Engine, segments: Sequence[PromptSegment], algorithm: str) -> Any:
    request = Request(segments, algorithm=algorithm)
    return engine.generate([request], max_tokens=3, logprobs=8, ignore_eos=True)[0]


def within(rule: Rule, segments: Sequence[PromptSegment]) -> Rule:
    return rule.within([before(s) for s in segments if isinstance(s, Chunk)])


@pytest.mark.parametrize("algorithm", RULES)
def test_chunks_know_their_documents(
    engine: Engine, oracle: Oracle, deviation: Any, tokens: Any, algorithm: str
) -> None:
    """Cold and warm, in another order, with a lead that the prompt does not show."""
    lead, a, b, c = tokens(150, 1), tokens(37, 2), tokens(21, 3), tokens(64, 4)
    text, question = Text(tokens=tokens(19, 5)), Text(tokens=tokens(9, 6))
    chunks = [
        Chunk(tokens=a),
        Chunk(tokens=b, document=a + b + c),
        Chunk(tokens=c, document=lead + c),
    ]
    spec, rule = f"{algorithm}:context=document", RULES[algorithm]
    for order in (chunks, chunks[::-1], chunks[2:]):
        segments = [text, *order, question]
        cold, warm = run(engine, segments, spec), run(engine, segments, spec)
        for result in (cold, warm):
            asked = Request(segments)
            assert deviation(oracle, within(rule, segments), asked, result) < TOLERANCE
        assert warm.counts.compile_work == 0
        assert deviation(oracle, rule, Request(segments), cold) > APART


def test_without_the_option_documents_do_not_count(
    engine: Engine, oracle: Oracle, deviation: Any, tokens: Any
) -> None:
    """Nor do chunks that have none, with it: both are the same chunk."""
    lead, a = tokens(30, 1), tokens(40, 2)
    question = Text(tokens=tokens(9, 3))
    plain, known = [Chunk(tokens=a), question], [Chunk(tokens=a, document=lead + a), question]
    first_ = run(engine, plain, "naive")
    assert first_.counts.compile_work == 40
    for segments, spec in ((known, "naive"), (plain, "naive:context=document")):
        result = run(engine, segments, spec)
        assert result.counts.compile_work == 0
        assert deviation(oracle, naive(), Request(segments), result) < TOLERANCE
    assert run(engine, known, "naive:context=document").counts.compile_work == 70


def test_chunks_of_a_document_share_what_precedes_them(engine: Engine, tokens: Any) -> None:
    """The text before the third chunk is that before the second, and the second."""
    lead, a, b, c = tokens(64, 1), tokens(32, 2), tokens(32, 3), tokens(32, 4)
    known = [Chunk(tokens=b, document=lead + a + b), Chunk(tokens=c, document=lead + a + b + c)]
    question = Text(tokens=tokens(9, 5))
    counts = [
        run(engine, [chunk, question], "naive:context=document").counts.compile_work
        for chunk in known
    ]
    assert counts == [64 + 32 + 32, 32 + 32]


class TestRefusals:
    def test_a_document_without_its_chunk(self, engine: Engine, tokens: Any) -> None:
        segments = [
            Chunk(tokens=tokens(20, 1)),
            Chunk(tokens=tokens(20, 2), document=tokens(90, 3)),
            Text(tokens=(5,)),
        ]
        with pytest.raises(ConfigError, match="chunk 2 of the request is not in its document"):
            run(engine, segments, "naive:context=document")

    def test_a_document_beyond_the_context(self, engine: Engine, tokens: Any) -> None:
        lead, chunk = tokens(CONTEXT - 19, 1), tokens(20, 2)
        segments = [Chunk(tokens=chunk, document=lead + chunk), Text(tokens=(5,))]
        with pytest.raises(
            ConfigError, match="compiled after have 513 tokens; the context has 512"
        ):
            run(engine, segments, "mepic:context=document")
        assert run(engine, segments, "mepic").tokens

    def test_a_document_beyond_the_pool(self, llama: Path, tokens: Any) -> None:
        config = EngineConfig(model=str(llama), dtype="float32", kv_blocks=8, context=CONTEXT)
        lead, chunk = tokens(90, 1), tokens(20, 2)
        segments = [Chunk(tokens=chunk, document=lead + chunk), Text(tokens=(5,))]
        with Engine(config) as small:
            with pytest.raises(ConfigError, match="needs 9 KV blocks, the pool has 8"):
                run(small, segments, "naive:context=document")
            segments[0] = Chunk(tokens=chunk, document=lead[:70] + chunk)
            assert run(small, segments, "naive:context=document").tokens

    def test_ids_that_the_model_does_not_have(self, engine: Engine, tokens: Any) -> None:
        chunk = tokens(20, 1)
        segments = [Chunk(tokens=chunk, document=(1 << 20, *chunk)), Text(tokens=(5,))]
        with pytest.raises(ConfigError, match=r"documents\[0\] has token id 1048576"):
            run(engine, segments, "naive:context=document")
