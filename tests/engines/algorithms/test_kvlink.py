"""KVLink: link tokens after every chunk, which they are, and what they see and cost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.algorithms import parse
from picbench.engines.algorithms.kvlink import KVLink
from picbench.engines.planning.layout import lay_out
from picbench.engines.planning.pages import SlotKind
from picbench.engines.planning.policy import LayoutConfig, Segment

LAYOUT = LayoutConfig(pad_token=2, link_tokens=(90, 91, 92, 93, 94))
HEAD, QUESTION = Segment((3,) * 20), Segment((5,) * 20)
A, B = Segment((6,) * 40, chunk=True), Segment((7,) * 40, chunk=True)


def arranged(spec: str, layout: LayoutConfig = LAYOUT):
    return list(parse(spec).arrange([HEAD, A, B, QUESTION], layout))


def links(spec: str, layout: LayoutConfig = LAYOUT):
    return [s.tokens for s in arranged(spec, layout) if s.lead]


def test_link_tokens_follow_every_chunk_and_are_none_of_the_users():
    head, a, first, b, second, question = arranged("kvlink:n=2")
    assert (head, a, b, question) == (HEAD, A, B, QUESTION)
    assert [(s.tokens, s.own, s.chunk) for s in (first, second)] == [((90, 91), (), False)] * 2


@pytest.mark.parametrize(
    ("spec", "layout", "expected"),
    [
        ("kvlink", LAYOUT, [(90, 91, 92, 93, 94)] * 2),
        ("kvlink:n=1", LAYOUT, [(90,)] * 2),
        ("kvlink:n=0", LAYOUT, []),
        ("kvlink:n=3:first=500", LAYOUT, [(500, 501, 502), (503, 504, 505)]),
        ("kvlink:n=3", LayoutConfig(pad_token=2), [(2, 2, 2)] * 2),
    ],
)
def test_which_tokens_link(spec, layout, expected):
    assert links(spec, layout) == expected


def test_more_link_tokens_than_the_model_has_are_refused():
    with pytest.raises(ValueError, match="the model has 5 link tokens"):
        links("kvlink:n=6")


@pytest.mark.parametrize("spec", ["kvlink", "kvlink:n=0", "kvlink:n=3:first=500"])
def test_it_says_how_many_tokens_it_adds(spec):
    """So that more than an engine has room for are refused before they are made."""
    assert parse(spec).added(2) == sum(map(len, links(spec)))


def test_without_link_tokens_it_is_naive():
    prompt = [HEAD, A, B, QUESTION]
    algorithm = parse("kvlink:n=0")
    plans = [
        lay_out(algorithm.arrange(prompt, LAYOUT), a.plan_chunk, LAYOUT)
        for a in (algorithm, parse("naive"))
    ]
    assert plans[0] == plans[1]


@given(st.integers(0, 40), st.permutations([A, B]))
def test_links_take_positions_and_change_no_chunk(n, chunks):
    algorithm = KVLink(n=n, first=500)
    plan = lay_out(
        algorithm.arrange([HEAD, *chunks, QUESTION], LAYOUT), algorithm.plan_chunk, LAYOUT
    )
    alone = lay_out([HEAD, *chunks, QUESTION], parse("naive").plan_chunk, LAYOUT)
    assert plan.end == alone.end + 2 * n
    assert plan.prompt_tokens == alone.prompt_tokens == 120
    assert [c.key for c in plan.canonicals] == [c.key for c in alone.canonicals]
    assert plan.count(SlotKind.PAD) == alone.count(SlotKind.PAD) + 2 * n
    assert set(plan.foreign) == set(range(500, 500 + 2 * n))
    where = {t: p for p, t in zip(plan.positions, plan.tokens, strict=True) if t >= 500}
    assert [where[500 + i] for i in range(2 * n)] == [
        *range(60, 60 + n),
        *range(100 + n, 100 + 2 * n),
    ]
