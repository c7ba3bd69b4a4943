"""The control that serves wrong KV: right sizes, wrong content."""

import pytest

from picbench.engines.algorithms import names, parse
from picbench.engines.planning.policy import LayoutConfig, Segment
from picbench.experiments.controls import Shuffled, with_wrong_chunks
from picbench.workloads.sample import Sample, SampleSegment

LAYOUT = LayoutConfig()


def sample(name: str, *chunks: tuple[int, ...]) -> Sample:
    text = SampleSegment("text", "t", (1, 2))
    segments = (text, *(SampleSegment("chunk", "c", tokens) for tokens in chunks), text)
    return Sample(name, "d", segments, ("yes",), 2)


def test_it_can_be_run_and_is_not_offered() -> None:
    assert isinstance(parse("shuffled"), Shuffled)
    assert "shuffled" not in names()


def test_chunks_get_other_tokens_of_the_same_number() -> None:
    text = Segment((1, 2))
    chunk = Segment((3, 4, 5), chunk=True, context=(8, 9))
    longer = Segment((6,), chunk=True, context=(8, 9))
    arranged = Shuffled().arrange([text, chunk, longer], LAYOUT)
    assert [segment.tokens for segment in arranged] == [(1, 2), (8, 9, 8), (8,)]
    assert [segment.context for segment in arranged] == [(), (), ()]
    assert [segment.chunk for segment in arranged] == [False, True, True]


def test_a_chunk_without_a_document_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a document"):
        Shuffled().arrange([Segment((3,), chunk=True)], LAYOUT)


def test_wrong_chunks_are_of_another_prompt() -> None:
    samples = [
        sample("a", (10,), (11,)),
        sample("b", (20,)),
        sample("c", (30,)),
        sample("d", (10,)),
    ]
    wrong = with_wrong_chunks(samples)
    assert [[chunk.context for chunk in s.chunks] for s in wrong] == [
        [(30,), (30,)],
        [(10,)],
        [(10,)],
        [(20,)],
    ]
    assert [s.tokens for s in wrong] == [s.tokens for s in samples], "prompts stay as they were"


def test_a_chunk_in_common_is_not_taken() -> None:
    wrong = with_wrong_chunks([sample("a", (10,), (30,)), sample("b", (10,), (20,))])
    assert wrong[0].chunks[0].context == (20,)


def test_prompts_that_have_the_same_chunks_cannot_be_used() -> None:
    with pytest.raises(ValueError, match="b has no chunk that a has not"):
        with_wrong_chunks([sample("a", (10,)), sample("b", (10,))])
