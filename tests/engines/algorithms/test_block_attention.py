"""Block-Attention: which segments are blocks of their own, and what it shares with naive."""

from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.algorithms import Algorithm, parse
from picbench.engines.planning.layout import lay_out
from picbench.engines.planning.pages import GAP
from picbench.engines.planning.policy import LayoutConfig, Segment

LAYOUT = LayoutConfig(bos_token=1)
BLOCKS, NAIVE = parse("block-attention"), parse("naive")
HEAD, MIDDLE, QUESTION = Segment((3,) * 20), Segment((4,) * 20), Segment((5,) * 20)
A, B = Segment((6,) * 40, chunk=True), Segment((7,) * 40, chunk=True)


def kinds(*prompt: Segment) -> str:
    arranged = BLOCKS.arrange(prompt, LAYOUT)
    assert [segment.tokens for segment in arranged] == [segment.tokens for segment in prompt]
    return "".join("c" if segment.chunk else "t" for segment in arranged)


def plan(algorithm: Algorithm, *prompt: Segment):
    return lay_out(algorithm.arrange(prompt, LAYOUT), algorithm.plan_chunk, LAYOUT)


def test_every_segment_but_the_first_text_and_the_last_is_compiled_alone():
    assert kinds(HEAD, A, B, QUESTION) == "tcct"
    assert kinds(A, B, QUESTION) == "cct"
    assert kinds(HEAD, A, MIDDLE, B, QUESTION) == "tccct"


def test_a_chunk_that_ends_the_prompt_is_the_last_block():
    assert kinds(HEAD, A, B) == "tct"
    assert kinds(A) == "t"
    last = plan(BLOCKS, HEAD, A, B)
    seen = [p for p in last.positions[last.canonical * 16 :] if p != GAP]
    assert seen == [*range(20), *range(60, 100)]


def test_naive_plans_text_chunks_and_a_question_alike():
    prompt = HEAD, A, B, QUESTION
    assert plan(BLOCKS, *prompt) == plan(NAIVE, *prompt)
    assert plan(BLOCKS, HEAD, A, MIDDLE, B) != plan(NAIVE, HEAD, A, MIDDLE, B)


@given(st.lists(st.booleans(), min_size=3, max_size=6))
def test_middle_blocks_are_found_in_any_prompt(chunks):
    """Invariant: what is compiled depends on the block alone."""
    blocks = [Segment((10 + i,) * 20, chunk=chunk) for i, chunk in enumerate(chunks)]
    there = {c.key for c in plan(BLOCKS, HEAD, *blocks, QUESTION).canonicals}
    back = {c.key for c in plan(BLOCKS, A, *blocks[::-1], QUESTION).canonicals}
    assert len(there) == len(blocks)
    assert there <= back
