"""Segments: which tokens are the user's, and of which kind; algorithms that fail."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.planning.layout import lay_out, measure
from picbench.engines.planning.pages import SlotKind
from picbench.engines.planning.policy import ChunkPolicy, LayoutConfig, Segment, Slot, answered
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
