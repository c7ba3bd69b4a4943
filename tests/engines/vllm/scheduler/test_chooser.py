"""Which chunks are served as text: always what is expected to be sooner, and why."""

from dataclasses import replace
from operator import gt, lt
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.planning.policy import Segment
from picbench.engines.vllm.scheduler.chooser import (
    Chooser,
    Offer,
    PromptOffer,
    _size,
    choose,
    names_of,
)
from picbench.engines.vllm.scheduler.machine_costs import MEASURED, MachineCosts

SHAPE = {"cpu": MEASURED["cpu"][0], "cuda": MEASURED["cuda"][0]}
COSTS = {name: MachineCosts(name, shape, 1024 * (name == "cuda")) for name, shape in SHAPE.items()}


def prompt(*chunks: dict[str, Any], text: int = 40, **more: Any) -> PromptOffer:
    """A prompt that begins with 20 tokens of text; chunks have 500 tokens, 16 of them linked."""
    offers, at = [], 20
    for chunk in chunks:
        offers.append(Offer(**{"start": at, "tokens": 500, "linked": 16} | chunk))
        at += offers[-1].tokens
    return PromptOffer(at + text, offers, **more)


NEW, SEEN, THERE = {"missing": 1.0, "known": False}, {"missing": 1.0, "uses": 1}, dict[str, Any]()

CHUNK = st.fixed_dictionaries(
    {
        "tokens": st.integers(1, 2000),
        "missing": st.sampled_from([0.0, 0.2, 1.0]),
        "uses": st.floats(0, 255),
        "known": st.booleans(),
    }
).flatmap(
    lambda chunk: st.integers(0, chunk["tokens"]).map(lambda linked: chunk | {"linked": linked})
)


@st.composite
def prompts(draw: st.DrawFn) -> PromptOffer:
    found = prompt(*draw(st.lists(CHUNK, min_size=1, max_size=8)), text=draw(st.integers(1, 300)))
    hits = {
        "text_hit": draw(st.integers(0, found.tokens - 1)),
        "plan_hit": draw(st.integers(0, 20)),
    }
    return found._replace(**hits)


@pytest.mark.parametrize("device", COSTS)
@given(offered=prompts(), kept=st.floats(0.01, 1), others=st.integers(0, 40))
def test_it_is_never_worse_than_the_better_pure_way(
    device: str, offered: PromptOffer, kept: float, others: int
) -> None:
    costs, chunks = COSTS[device], offered.chunks
    found = choose(costs, offered, kept, others)
    own, every = [i for i in range(found.chunks) if i not in found.texts], range(len(chunks))
    assert found.expected == pytest.approx(costs.first_token(_size(offered, own)))
    sizes = _size(offered, own), _size(offered, ())
    taken, text = (costs.first_token(size) + others * costs.work(size) for size in sizes)
    if not any(chunks[i].missing for i in own):
        # Nothing was invested: it is no later than text.
        assert taken <= text + 1e-12
    elif not any(chunks[i].uses for i in own):
        sure = all(chunks[i].known for i in own)
        assert taken <= (1 if sure else 0.9) * text + 1e-12
    if not others and not any(offer.missing or not offer.known for offer in chunks):
        whole = costs.first_token(_size(offered, every))
        assert found.expected is not None and found.expected <= whole + 1e-12
    assert choose(costs, offered, kept, others) == found


@pytest.mark.parametrize("device", COSTS)
def test_what_is_resident_is_mapped_and_what_is_new_is_text(device: str) -> None:
    costs = COSTS[device]
    assert choose(costs, prompt(*[THERE] * 4)).texts == ()
    assert choose(costs, prompt(*[NEW] * 4)).texts == (0, 1, 2, 3)
    assert choose(costs, prompt(THERE, NEW | {"tokens": 60}, THERE, THERE)).texts == (1,)


@pytest.mark.parametrize("device", COSTS)
def test_new_chunks_are_compiled_where_that_alone_is_sooner(device: str) -> None:
    assert choose(COSTS[device], prompt(*[NEW] * 64)).texts == ()
    assert choose(COSTS[device], prompt(*[NEW | {"tokens": 60}] * 4)).texts == (0, 1, 2, 3)


@pytest.mark.parametrize("device", COSTS)
def test_what_was_seen_before_is_compiled_if_compiled_chunks_come_again(device: str) -> None:
    costs = COSTS[device]
    assert choose(costs, prompt(*[SEEN] * 8)).texts == ()
    assert choose(costs, prompt(THERE, SEEN, NEW | {"tokens": 60}, THERE)).texts == (2,)
    # Nothing pays that is dropped before it is used again, and takes longer now.
    small = [SEEN | {"tokens": 60}] * 4
    assert len(choose(costs, prompt(*small), 0.001).texts) == 4


@pytest.mark.parametrize("device", COSTS)
def test_new_chunks_are_compiled_where_new_ones_came_again(device: str) -> None:
    costs = COSTS[device]
    chunks = {"cpu": NEW | {"tokens": 200}, "cuda": NEW}[device]
    assert choose(costs, prompt(*[chunks | {"uses": 0.02}] * 4)).texts == (0, 1, 2, 3)
    assert choose(costs, prompt(*[chunks | {"uses": 0.5}] * 4)).texts == ()


def test_chunks_are_mapped_that_take_longer_themselves_and_less_of_others() -> None:
    costs = COSTS["cuda"]
    small = prompt(*[{"tokens": 128}] * 2)
    ways = _size(small, (0, 1)), _size(small, ())
    own, work = map(costs.first_token, ways), map(costs.work, ways)
    assert gt(*own) and lt(*work)
    assert choose(costs, small).texts == (0, 1)
    assert choose(costs, small, others=15).texts == ()


@pytest.mark.parametrize("device", COSTS)
def test_resident_chunks_are_mapped_whatever_is_done_with_new_ones(device: str) -> None:
    costs = COSTS[device]
    for uses in (0.0, 0.3, 0.9):
        new = NEW | {"tokens": 128, "uses": uses}
        found = choose(costs, prompt(*[THERE | {"tokens": 128}] * 4, *[new] * 4))
        assert not {0, 1, 2, 3} & {*found.texts}


@pytest.mark.parametrize("device", COSTS)
def test_what_prefix_caching_has_is_text(device: str) -> None:
    costs = COSTS[device]
    asked = prompt(*[SEEN | {"uses": 200}] * 3)
    assert choose(costs, asked._replace(text_hit=asked.tokens - 16)).texts == (0, 1, 2)
    found = choose(costs, prompt(SEEN, THERE, THERE, text_hit=520))
    assert found.texts == (0,)
    # Where prefix caching has a part of the prompt and chunks are resident, most of both is used.
    assert choose(costs, prompt(*[THERE] * 4, text_hit=520)).texts in ((0,), ())


def test_short_prompts_are_text_where_mapping_chunks_takes_longer() -> None:
    short = prompt({"tokens": 60}, {"tokens": 60})
    assert choose(COSTS["cuda"], short).texts == (0, 1)
    # And their chunks are not compiled, however often they come.
    often = [SEEN | {"tokens": 60, "uses": 255}] * 2
    assert choose(COSTS["cuda"], prompt(*often)).texts == (0, 1)


def test_chunks_of_which_all_is_linked_are_text() -> None:
    whole = {"tokens": 16, "linked": 16}
    assert choose(COSTS["cpu"], prompt(whole, whole)).texts == (0, 1)
    assert choose(COSTS["cpu"], prompt()).expected == pytest.approx(
        COSTS["cpu"].first_token(_size(prompt(), ()))
    )


def test_a_slower_machine_is_expected_to_be_slower() -> None:
    costs = MachineCosts("cuda", SHAPE["cuda"], 1024)
    asked = prompt(*[THERE] * 4)
    size = _size(asked, ())
    before = choose(costs, asked)
    for _ in range(400):
        costs.correct(size.first_token(1024), 3 * COSTS["cuda"].first_token(size), linked=False)
    assert costs.first_token(size) == pytest.approx(3 * COSTS["cuda"].first_token(size), rel=0.05)
    after = choose(costs, asked)
    assert after.expected is not None and before.expected is not None
    assert after.expected > before.expected
    assert replace(after, expected=None) == replace(before, expected=None)


@pytest.mark.parametrize("device", COSTS)
def test_a_way_is_tried_that_is_almost_as_good_and_rarely_served(device: str) -> None:
    graphs = COSTS[device].graph_tokens
    costs, ways = MachineCosts(device, SHAPE[device], graphs), ((), (0, 1))

    def apart(one: PromptOffer) -> float:
        text, mapped = (costs.first_token(_size(one, own)) for own in ways)
        return abs(text - mapped)

    sizes = ({"tokens": size, "linked": 0} for size in range(16, 1500, 8))
    even = min((prompt(size, size) for size in sizes), key=apart)
    usual = choose(costs, even).texts
    for linked in (not usual, bool(usual)):
        size = _size(even, ways[linked])
        for _ in range(20):
            costs.correct(size.first_token(graphs), costs.first_token(size), linked=linked)
        # At first the other way is tried, then both are known.
        assert (choose(costs, even).texts == usual) is (linked is bool(usual))
        # Others must not wait for that.
        assert choose(costs, even, others=1) == choose(COSTS[device], even, others=1)
    # Nothing is compiled for it.
    small, text = prompt(*[NEW | {"tokens": 60}] * 2), MachineCosts(device, SHAPE[device], graphs)
    size = _size(small, ())
    text.correct(size.first_token(graphs), text.first_token(size), linked=False)
    assert choose(text, small).texts == (0, 1)


def test_prompts_that_are_text_in_any_case_need_no_plan() -> None:
    store: Any = SimpleNamespace(forget_uses=lambda: None, kept_share=1.0)
    others = [0]
    chooser = Chooser(COSTS["cuda"], store, SimpleNamespace(), lambda: others[0])  # type: ignore[arg-type]

    def ask(chunks: int, tokens: int, hit: int = 0) -> Any:
        parts = [Segment((i,) * tokens, chunk=True) for i in range(chunks)]
        names = names_of(parts, "a")
        found = chooser.without_plan([*parts, Segment((99,) * 40)], names, hit)
        return found, [chooser._sketch.count(name) for name in names]

    # So short that they would be text if they were resident; they are counted all the same.
    assert [ask(2, 128)[0].texts for _ in range(3)] == [(0, 1)] * 3
    assert ask(2, 128)[1] == [4, 4]
    # Of others' time chunks take less.
    others[0] = 15
    assert ask(2, 128) == (None, [4, 4])
    others[0] = 0
    # Long ones are text where new chunks do not recur; then their plan shows what is resident.
    for number in range(400):
        chooser._sketch.note(names_of([Segment((number,), chunk=True)], "b")[0])
    assert ask(3, 600)[0].texts == (0, 1, 2)
    assert ask(3, 600) == (None, [1, 1, 1])
    # What the prefix cache has of a prompt as text is no use of its chunks.
    assert [ask(2, 128, hit=256)[1] for _ in range(2)] == [[4, 4]] * 2
