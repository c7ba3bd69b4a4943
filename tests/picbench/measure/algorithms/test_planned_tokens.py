"""Linked tokens by the plan: what is recomputed in chunks, and what is added to the prompt."""

import pytest

from picbench.engines.algorithms import parse
from picbench.experiments.arm_scores import planned_links
from picbench.workloads.sample import Sample, SampleSegment


def sample(*lengths: int) -> Sample:
    """A prompt of 20 tokens of text, chunks of these lengths, and a question of 10."""
    text = SampleSegment("text", "t", tuple(range(20)))
    chunks = [
        SampleSegment("chunk", "c", tuple(range(100 * n, 100 * n + length)))
        for n, length in enumerate(lengths, 1)
    ]
    question = SampleSegment("text", "q", tuple(range(10)))
    return Sample("s", "d", (text, *chunks, question), ("a",), max_tokens=4)


@pytest.mark.parametrize(
    ("spec", "linked"),
    [
        ("full", 80),
        ("naive", 0),
        ("epic:k=8", 8),
        ("epic:k=0", 0),
        ("epic:k=8:bos=chunk", 8),
        ("cacheblend:r=0.15", 12),
        ("cacheblend:r=0.5:select=first", 40),
        ("mepic", 32),
        ("mepic:blocks=2", 64),
        ("mepic:select=question", 32),
        ("mepic:anchored=on", 32),
        ("kvlink:n=5", 10),
        ("block-attention", 0),
        # 12 pads after the text; each chunk of 40 has 8 pads before it, in its first block.
        ("mepic:pad=paper", 12 + 32),
    ],
)
def test_two_chunks_of_forty(spec: str, linked: int) -> None:
    assert planned_links(sample(40, 40), parse(spec)) == linked


def test_a_short_chunk_is_linked_as_a_whole_and_no_more() -> None:
    assert planned_links(sample(40, 5), parse("mepic")) == 21


def test_documents_make_no_difference() -> None:
    first, *rest = sample(40, 40).segments
    before = SampleSegment("text", "b", tuple(range(500, 540)))
    chunks = [
        SampleSegment(s.kind, s.text, s.tokens, before if s.kind == "chunk" else None) for s in rest
    ]
    found = Sample("s", "d", (first, *chunks), (), max_tokens=4)
    assert planned_links(found, parse("mepic:context=document")) == 32
