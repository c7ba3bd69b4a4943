"""Segments: which tokens are the user's, and of which kind; algorithms that fail."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.planning.layout import lay_out, measure
from picbench.engines.planning.pages import GAP, SlotKind
from picbench.engines.planning.policy import (
    Anchor,
    ChunkPolicy,
    Deviation,
    DeviationSelection,
    LayoutConfig,
    Pad,
    QuestionSelection,
    Segment,
    Slot,
    answered,
)
from picbench.errors import ConfigError

LAYOUT = LayoutConfig(16)
PROMPT = [Segment((1, 2, 3, 4), chunk=True), Segment((5,))]


def fails(index: int, length: int) -> ChunkPolicy:
    raise IndexError("no chunk")


def forgets(index: int, length: int) -> Any:
    return None


@pytest.mark.parametrize("plan", [lay_out, measure])
def test_the_call_and_the_line_that_failed_are_named(plan: Any) -> None:
    with pytest.raises(ValueError, match=r"plan_chunk\(0, 4\) raised IndexError: no chunk \(test_"):
        plan(PROMPT, fails, LAYOUT)
    with pytest.raises(ValueError, match=r"plan_chunk\(0, 4\) returned None, which is no Chunk"):
        plan(PROMPT, forgets, LAYOUT)


@pytest.mark.parametrize("linked", [[1.5], ["1"], 1, None, (i for i in (0, 1))])
def test_links_are_a_sequence_of_whole_numbers(linked: Any) -> None:
    def links(index: int, length: int) -> ChunkPolicy:
        return ChunkPolicy(linked=linked)

    with pytest.raises(ValueError, match=r"plan_chunk\(0, 4\) links .*, which is no sequence of"):
        lay_out(PROMPT, links, LAYOUT)


def test_what_an_algorithm_says_about_a_prompt_stays_as_it_is() -> None:
    def refuses(index: int, length: int) -> ChunkPolicy:
        raise ConfigError("too long", hint="cut it")

    with pytest.raises(ConfigError, match=r"^too long \(cut it\)$"):
        answered(refuses)(0, 4)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    """Chunks with slots between and beside the user's tokens, and with added tokens around."""
    tokens: list[int] = []
    slots = []
    for length, filled, between in draw(
        st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4), st.integers(0, 3)), max_size=5)
    ):
        slots.append(Slot(len(tokens), length, (7,) * min(length, filled)))
        tokens += [99] * length + [5] * between
    chunk = Segment((*tokens, 6), chunk=True, slots=tuple(slots))
    return chunk.framed((1,) * draw(st.integers(0, 2)), (2,) * draw(st.integers(0, 2)))


@given(segments(), st.data())
def test_placeholders_and_added_tokens_are_pads(segment, data):
    begin = data.draw(st.integers(0, len(segment.tokens)))
    count = data.draw(st.integers(0, len(segment.tokens) - begin))
    users = [
        segment.lead <= i < len(segment.tokens) - segment.trail and i not in segment.placeholders
        for i in range(begin, begin + count)
    ]
    expected = tuple(SlotKind.CHUNK if user else SlotKind.PAD for user in users)
    assert segment.kinds(begin, count, SlotKind.CHUNK) == expected


@given(segments())
def test_slots_have_the_users_tokens(segment):
    filled = [token for slot in segment.slots for token in slot.tokens]
    assert [token for token in segment.own if token == 7] == filled
    assert [token for token in segment.own if token != 7] == [
        token for token in segment.tokens if token in (5, 6)
    ]


class _Slots(tuple[Slot, ...]):
    """Slots that count how often one of them is looked at."""

    __slots__ = ()
    looked = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        _Slots.looked += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self) -> Any:
        _Slots.looked += len(self)
        return super().__iter__()


def test_no_page_goes_through_all_slots():
    slots = _Slots(Slot(at, 1, (7,)) for at in range(0, 4000, 4))
    segment = Segment((5,) * 4000, chunk=True, slots=slots)
    _Slots.looked = 0
    for begin in range(0, 4000, 16):
        kinds = segment.kinds(begin, 16, SlotKind.CHUNK)
        assert kinds == (SlotKind.PAD, *(SlotKind.CHUNK,) * 3) * 4
    assert _Slots.looked < 50 * len(slots)


SIZE = 16
tokens = st.lists(st.integers(3, 900), min_size=1, max_size=70).map(tuple)
prompts = st.lists(st.builds(Segment, tokens=tokens, chunk=st.booleans()), min_size=1, max_size=6)
shares = st.floats(0, 1)


def picking(share: float, anchor: Anchor):
    selection = DeviationSelection(share, Deviation.VALUES)
    return lambda index, length: ChunkPolicy((), anchor, private=True, selection=selection)


@given(prompts, shares, st.sampled_from([Anchor(), Anchor(head=True)]))
def test_a_plan_reserves_slots_for_what_is_picked(prompt, share, anchor):
    layout = LayoutConfig(SIZE)
    plan = lay_out(prompt, picking(share, anchor), layout)
    footprint = measure(prompt, picking(share, anchor), layout)
    assert (footprint.slots, footprint.end) == (len(plan.tokens), plan.end)
    assert footprint.compares == (plan.picks is not None)
    if plan.picks is None:
        return
    assert plan.keys == [None] * len(plan.keys)
    assert plan.shared == 0
    # Every token of the prompt has one slot, of which the last is computed; the rest is reserved.
    first, count = plan.canonical * SIZE, plan.picks.count
    assert sorted(p for p in plan.positions if p != GAP) == list(range(plan.end))
    assert plan.positions[first : first + count] == [GAP] * count
    assert plan.positions[-1] == plan.end - 1
    fixed = plan.positions[first + count :]
    assert fixed == sorted(fixed)
    # What is picked is counted once, as linked.
    assert len(plan.kinds) == len(plan.tokens)
    assert plan.real == sum(kind is not SlotKind.PAD for kind in plan.kinds)
    linked, copied = plan.count(SlotKind.LINKED), plan.count(SlotKind.PRIVATE)
    assert linked + copied == sum(len(s.tokens) for s in prompt if s.chunk)


@pytest.mark.parametrize(
    ("share", "count"), [(0, 0), (0.15, 15), (0.29, 29), (0.999, 99), (1, 100)]
)
def test_the_share_is_rounded_down(share, count):
    chunks = [Segment(tuple(range(40)), chunk=True), Segment(tuple(range(60)), chunk=True)]
    plan = lay_out([*chunks, Segment((1,))], picking(share, Anchor()), LayoutConfig(SIZE))
    assert plan.picks is not None
    assert plan.picks.count == count
    assert plan.count(SlotKind.LINKED) == count


def test_the_last_token_is_computed_besides():
    plan = lay_out(
        [Segment(tuple(range(40)), chunk=True)], picking(1, Anchor()), LayoutConfig(SIZE)
    )
    assert plan.picks is not None
    assert plan.picks.count == 39
    assert plan.positions[-1] == 39


def test_a_prompt_of_texts_or_of_one_token_has_nothing_to_pick():
    for prompt in ([Segment((1, 2))], [Segment((1,), chunk=True)]):
        plan = lay_out(prompt, picking(0.5, Anchor()), LayoutConfig(SIZE))
        assert plan.picks is None


@given(prompts, st.integers(1, 3), st.sampled_from([Anchor(), Anchor(head=True)]))
def test_by_the_question_as_many_are_linked_as_are_first(prompt, blocks, anchor):
    """Blocks of chunks are shared; what is computed has no key."""
    layout, most = LayoutConfig(SIZE), blocks * SIZE
    asked = ChunkPolicy(anchor=anchor, selection=QuestionSelection(most))
    plan = lay_out(prompt, lambda *_: asked, layout)
    footprint = measure(prompt, lambda *_: asked, layout)
    assert (footprint.slots, footprint.end) == (len(plan.tokens), plan.end)
    assert not footprint.compares
    naive = lay_out(prompt, lambda *_: ChunkPolicy(anchor=anchor), layout)
    assert plan.keys[: plan.shared] == naive.keys[: naive.shared]
    if plan.picks is None:
        return
    assert plan.keys[plan.shared :] == [None] * len(plan.computed)
    lengths = [len(s.tokens) for s in prompt if s.chunk]
    ends = prompt[-1].chunk
    budget = sum(min(most, length) for length in lengths)
    assert plan.picks.count == min(budget, sum(lengths) - ends)
    assert plan.count(SlotKind.LINKED) == plan.picks.count + ends
    assert plan.count(SlotKind.LINKED) + plan.count(SlotKind.CHUNK) == sum(lengths)
    assert plan.real == sum(len(s.tokens) for s in prompt)


def test_what_cannot_be_picked_from_is_refused():
    chunk, layout = Segment(tuple(range(40)), chunk=True), LayoutConfig(SIZE)
    selection = DeviationSelection(0.5, Deviation.KEYS)
    with pytest.raises(ValueError, match="by deviation must be private"):
        lay_out([chunk], lambda i, n: ChunkPolicy(selection=selection), layout)
    late, gaps = Segment((1, 2), position=50), "without gaps, pads and empty slots"
    for prompt, pad in (([chunk, late], Pad.MASKED), ([chunk], Pad.PAPER)):
        for find in (lay_out, measure):
            with pytest.raises(ValueError, match=gaps):
                find(prompt, picking(0.5, Anchor()), LayoutConfig(SIZE, pad=pad))
    with pytest.raises(ValueError, match="different selections"):
        lay_out(
            [chunk, chunk],
            lambda i, n: ChunkPolicy(private=True, selection=selection if i else None),
            layout,
        )
