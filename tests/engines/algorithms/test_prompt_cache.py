"""Prompt Cache: chunks are compiled where they stand, and shared only there."""

from dataclasses import replace

from picbench.engines.algorithms import parse
from picbench.engines.planning.layout import lay_out
from picbench.engines.planning.policy import LayoutConfig, Segment
from picbench.engines.planning.schema import Alternatives, Module, Parameter, Schema

LAYOUT = LayoutConfig()
ALGORITHM = parse("prompt-cache")
A, B = Segment((6,) * 40, chunk=True), Segment((7,) * 40, chunk=True)
QUESTION = Segment((5,) * 20)


def keys(*prompt: Segment) -> list[bytes]:
    plan = lay_out(ALGORITHM.arrange(prompt, LAYOUT), ALGORITHM.plan_chunk, LAYOUT)
    return [chunk.key for chunk in plan.canonicals]


def test_nothing_is_linked():
    assert not ALGORITHM.plan_chunk(1, 40).linked
    assert ALGORITHM.plan_chunk(1, 40).fixed


def test_without_positions_the_prompt_is_its_own_schema():
    assert keys(A, B, QUESTION)[1] == keys(replace(A, tokens=(8,) * 40), B, QUESTION)[1]
    assert keys(A, B, QUESTION)[1] != keys(B, QUESTION)[0]


def test_alternatives_leave_the_modules_after_them_where_they_were():
    schema = Schema(
        [
            Alternatives([Module("a", [(6,) * 40]), Module("b", [(7,) * 9])]),
            Module("c", [(8,) * 20, Parameter("p", 4), (9,) * 20]),
        ],
        lambda text: [],
    )
    prompts = [schema.request([name, "c"], (5, 5)) for name in "ab"]
    found = []
    for prompt in prompts:
        first, last, question = (Segment(s.tokens, position=s.position) for s in prompt.segments)
        found.append(keys(replace(first, chunk=True), replace(last, chunk=True), question))
    assert found[0][1] == found[1][1]
    assert found[0][0] != found[1][0]
