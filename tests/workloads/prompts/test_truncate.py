from itertools import chain
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from picbench.workloads.prompts.tokens import Encoder
from picbench.workloads.prompts.truncate import Frame, truncate
from picbench.workloads.sample import SampleSegment


class Letters:
    """Token i is the i-th character."""

    bos_token_id = None

    def __call__(self, text: Any, *, add_special_tokens: bool) -> dict[str, Any]:
        raise NotImplementedError

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(index) for index in token_ids)


def segment(kind: Any, text: str) -> SampleSegment:
    return SampleSegment(kind, text, tuple(ord(letter) for letter in text))


SEGMENTS = (
    segment("text", "SYS"),
    segment("chunk", "abcdef"),
    segment("chunk", "ghi"),
    segment("text", "Q?"),
)


def test_a_prompt_that_fits_is_left_alone() -> None:
    assert truncate(SEGMENTS, 14, Encoder(Letters())) == SEGMENTS


def test_the_middle_is_left_out_and_segments_are_kept() -> None:
    assert truncate(SEGMENTS, 10, Encoder(Letters())) == (
        segment("text", "SYS"),
        segment("chunk", "ab"),
        segment("chunk", "ghi"),
        segment("text", "Q?"),
    )


def test_a_segment_around_the_middle_keeps_both_ends() -> None:
    segments = (segment("text", "S"), segment("chunk", "abcdefgh"), segment("text", "Q"))
    assert truncate(segments, 6, Encoder(Letters()))[1] == segment("chunk", "abgh")


def test_an_empty_segment_is_dropped() -> None:
    assert truncate(SEGMENTS, 4, Encoder(Letters())) == (
        segment("text", "SY"),
        segment("text", "Q?"),
    )


def test_a_chat_template_stays_whole() -> None:
    segments = (segment("text", "<SYS"), segment("chunk", "abcdefgh"), segment("text", "Q?>!"))
    # of 11 tokens 3 are the template's, of the other 8 each end keeps 4
    kept = truncate(segments, 11, Encoder(Letters()), Frame(before=1, after=2))
    assert "".join(one.text for one in kept) == "<SYSa" + "ghQ?>!"


@given(st.lists(st.text("abc", min_size=1, max_size=9), min_size=1, max_size=6), st.integers(2, 60))
def test_keeps_the_two_halves(texts: list[str], budget: int) -> None:
    segments = [segment("chunk", text) for text in texts]
    tokens = list(chain.from_iterable(one.tokens for one in segments))
    kept = list(
        chain.from_iterable(one.tokens for one in truncate(segments, budget, Encoder(Letters())))
    )
    half = budget // 2
    assert kept == (tokens if len(tokens) <= budget else tokens[:half] + tokens[-half:])
