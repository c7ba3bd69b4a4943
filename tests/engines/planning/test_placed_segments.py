"""Segments with added tokens, positions and slots: what a plan makes of them."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.planning.layout import lay_out, measure, place, plain_tokens
from picbench.engines.planning.pages import GAP, SlotKind
from picbench.engines.planning.policy import (
    Anchor,
    ChunkPolicy,
    LayoutConfig,
    Pad,
    PlanChunk,
    Segment,
    Slot,
)
from picbench.errors import ConfigError

SIZE = 16
PLACEHOLDER, ADDED = 0, 2
LAYOUT = LayoutConfig(SIZE, "", pad_token=PLACEHOLDER, bos_token=1)

ids = st.integers(3, 900)
#: (the user's tokens before a slot, its length, what fills it)
pairs = st.tuples(
    st.lists(ids, min_size=1, max_size=20), st.integers(1, 20), st.lists(ids, max_size=20)
)


@st.composite
def segments(draw: st.DrawFn) -> list[Segment]:
    """Prompts of all that a segment can be; positions may leave gaps and never overlap."""
    found, at = [], 0
    for _ in range(draw(st.integers(1, 5))):
        segment = _segment(draw)
        if draw(st.booleans()):
            at += draw(st.integers(0, 40))
            segment = replace(segment, position=at)
        at += len(segment.tokens)
        found.append(segment)
    return found


def _segment(draw: st.DrawFn) -> Segment:
    if draw(st.booleans()):
        segment = Segment(tuple(draw(st.lists(ids, min_size=1, max_size=40))))
    else:
        tokens: tuple[int, ...] = ()
        slots: list[Slot] = []
        for before, length, fill in draw(st.lists(pairs, max_size=2)):
            tokens += tuple(before)
            slots.append(Slot(len(tokens), length, tuple(fill[:length])))
            tokens += (PLACEHOLDER,) * length
        tokens += tuple(draw(st.lists(ids, min_size=1, max_size=40)))
        segment = Segment(tokens, chunk=True, slots=tuple(slots))
    lead, trail = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    return segment.framed((ADDED,) * lead, (ADDED,) * trail)


@st.composite
def policies(draw: st.DrawFn) -> PlanChunk:
    seed, fixed, private = draw(st.integers(0, 999)), draw(st.booleans()), draw(st.booleans())

    def plan_chunk(index: int, length: int) -> ChunkPolicy:
        linked = [i for i in range(length) if hash((seed, index, i)) % 4 == 0]
        return ChunkPolicy(linked, private=private, fixed=fixed)

    return plan_chunk


def expected(prompt: Sequence[Segment]) -> dict[int, int]:
    """Tokens by position, as the prompt says."""
    seen, at = {}, 0
    for segment in prompt:
        at = at if segment.position is None else segment.position
        hidden = {i for slot in segment.slots for i in slot.indices}
        seen |= {at + i: t for i, t in enumerate(segment.tokens) if i not in hidden}
        for slot in segment.slots:
            seen |= {at + slot.index + i: t for i, t in enumerate(slot.tokens)}
        at += len(segment.tokens)
    return seen


def none(index: int, length: int) -> ChunkPolicy:
    return ChunkPolicy()


def fixed(index: int, length: int) -> ChunkPolicy:
    return ChunkPolicy(fixed=True)


@given(segments(), policies())
def test_every_token_is_seen_once_at_its_position(prompt, policy):
    plan = lay_out(prompt, policy, LAYOUT)
    pairs = zip(plan.positions, plan.tokens, strict=True)
    seen = sorted((p, t) for p, t in pairs if p != GAP)
    assert seen == sorted(expected(prompt).items())
    assert plan.prompt_tokens == sum(len(segment.own) for segment in prompt)
    assert sum(kind is not SlotKind.PAD for kind in plan.kinds) == plan.prompt_tokens


@given(segments(), policies())
def test_no_computed_token_sees_a_later_slot(prompt, policy):
    plan = lay_out(prompt, policy, LAYOUT)
    computed = plan.positions[plan.canonical * SIZE :]
    assert computed == sorted(computed)
    assert computed[-1] == max(expected(prompt)) < plan.end


@given(segments(), policies())
def test_the_footprint_is_the_plans(prompt, policy):
    plan, footprint = lay_out(prompt, policy, LAYOUT), measure(prompt, policy, LAYOUT)
    assert (footprint.slots, footprint.end) == (len(plan.tokens), plan.end)


@given(segments())
def test_fixed_chunks_are_compiled_where_they_stand(prompt):
    plan = lay_out(prompt, fixed, LAYOUT)
    cached_at = [at for first, n in plan.cached_at_runs() for at in range(first, first + n)]
    canonical = plan.canonical * SIZE
    for position, at in zip(plan.positions[:canonical], cached_at, strict=False):
        assert position in (at, GAP)
    for chunk in plan.canonicals:
        compiled = chunk.compile_plan()
        seen = [p for p in compiled.positions if p != GAP]
        assert seen == list(range(seen[0], compiled.end))


@given(st.lists(ids, min_size=1, max_size=40), st.integers(0, 50), st.integers(1, 50))
def test_a_fixed_chunk_is_another_one_elsewhere(tokens, at, shift):
    chunk = Segment(tuple(tokens), chunk=True)
    for policy, same in ((none, True), (fixed, False)):
        prompts = [[replace(chunk, position=p), Segment((9,))] for p in (at, at + shift)]
        keys = [
            {key for c in lay_out(p, policy, LAYOUT).canonicals for key in c.keys} for p in prompts
        ]
        assert keys[0] == keys[1] if same else not keys[0] & keys[1]


@given(segments(), policies())
def test_foreign_tokens_are_those_that_the_user_did_not_send(prompt, policy):
    sent = {token for segment in prompt for token in segment.own}
    plan = lay_out(prompt, policy, LAYOUT)
    placeholders = {PLACEHOLDER} if any(segment.slots for segment in prompt) else set()
    assert set(plan.foreign) == (set(plan.tokens) | placeholders) - sent


@given(segments(), policies())
def test_equal_keys_mean_equal_content(prompt, policy):
    plan = lay_out(prompt, policy, LAYOUT)
    content: dict[bytes, object] = {}
    for chunk in plan.canonicals:
        for page in chunk.compile_plan().pages:
            assert content.setdefault(page.name, page.tokens) == page.tokens


def test_what_fills_a_slot_is_in_no_key_of_the_chunk_and_in_those_after_it():
    def plan(fill: int):
        slot = Slot(10, 8, (fill,) * 4)
        chunk = Segment((7,) * 10 + (PLACEHOLDER,) * 8 + (8,) * 10, chunk=True, slots=(slot,))
        return lay_out([chunk, Segment((9,) * 30)], none, LAYOUT)

    one, other = plan(20), plan(21)
    assert one.canonicals == other.canonicals
    computed = [{page.key for page in p.computed} - {None} for p in (one, other)]
    assert computed[0]
    assert not computed[0] & computed[1]


def test_gaps_are_in_the_keys_of_text():
    near, far = (
        lay_out([Segment((3,) * 20), Segment((4,) * 20, position=p)], none, LAYOUT)
        for p in (20, 21)
    )
    assert near.keys[0] == far.keys[0]
    assert near.keys[1] != far.keys[1]


def test_vllms_own_keys_are_those_of_text_without_gaps():
    keys = [b"raw0", b"raw1", b"raw2"]
    text, late = Segment((3,) * 20), Segment((4,) * 20, position=40)
    plan = lay_out([text, late, Segment((5,) * 20, chunk=True)], none, LAYOUT, prefix_keys=keys)
    assert keys[0] in plan.keys
    assert not {keys[1], keys[2]} & set(plan.keys)
    assert plain_tokens(place([replace(text, position=1)], LAYOUT)) == 0
    assert plain_tokens(place([text.framed(lead=(1,))], LAYOUT)) == 0


def test_bad_places_are_refused():
    chunk = Segment((3,) * 20, chunk=True)
    with pytest.raises(ConfigError, match=r"positions overlap: .* at position 19, .* before 20"):
        lay_out([chunk, Segment((4,), position=19)], none, LAYOUT)
    with pytest.raises(ConfigError, match="visible pads move positions"):
        lay_out([replace(chunk, position=3)], none, LayoutConfig(SIZE, pad=Pad.PAPER))
    with pytest.raises(ValueError, match="a chunk of empty slots"):
        empty = Segment((0,) * 4, chunk=True, slots=(Slot(0, 4, ()),))
        lay_out([Segment((9,)), empty], none, LAYOUT)
    with pytest.raises(ValueError, match="neither anchor nor document"):
        lay_out([chunk], lambda i, n: ChunkPolicy(anchor=Anchor(bos=4), fixed=True), LAYOUT)
    with pytest.raises(ValueError, match="neither anchor nor document"):
        known = replace(chunk, context=(1, 2))
        lay_out([known], lambda i, n: ChunkPolicy(fixed=True), replace(LAYOUT, documents=True))
