from itertools import chain
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from picbench.workloads.prompts.truncate import Frame, truncate
from picbench.workloads.sample import SampleSegment


class Letters:
    """Token i is the i-th character."""

    bos_token_id = None

    def __call__(self, text: Any, *, add_special_tokens: bool) -> dict[str, Any]:
        raise NotImplementedError

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(index) for index in token_ids)


def part(kind: Any, text: str) -> SampleSegment:
    return SampleSegment(kind, text, tuple(ord(letter) for letter in text))


PARTS = (part("text", "SYS"), part("chunk", "abcdef"), part("chunk", "ghi"), part("text", "Q?"))


def test_a_prompt_that_fits_is_left_alone() -> None:
    assert truncate(PARTS, 14, Letters()) == PARTS


def test_the_middle_is_left_out_and_parts_stay_parts() -> None:
    assert truncate(PARTS, 10, Letters()) == (
        part("text", "SYS"),
        part("chunk", "ab"),
        part("chunk", "ghi"),
        part("text", "Q?"),
    )


def test_a_part_around_the_middle_keeps_both_ends() -> None:
    parts = (part("text", "S"), part("chunk", "abcdefgh"), part("text", "Q"))
    assert truncate(parts, 6, Letters())[1] == part("chunk", "abgh")


def test_a_part_of_which_nothing_is_left_goes() -> None:
    assert truncate(PARTS, 4, Letters()) == (part("text", "SY"), part("text", "Q?"))


def test_a_chat_template_stays_whole() -> None:
    parts = (part("text", "<SYS"), part("chunk", "abcdefgh"), part("text", "Q?>!"))
    # of 11 tokens 3 are the template's, of the other 8 each end keeps 4
    kept = truncate(parts, 11, Letters(), Frame(before=1, behind=2))
    assert "".join(one.text for one in kept) == "<SYSa" + "ghQ?>!"


@given(st.lists(st.text("abc", min_size=1, max_size=9), min_size=1, max_size=6), st.integers(2, 60))
def test_keeps_the_two_halves(texts: list[str], budget: int) -> None:
    parts = [part("chunk", text) for text in texts]
    tokens = list(chain.from_iterable(one.tokens for one in parts))
    kept = list(chain.from_iterable(one.tokens for one in truncate(parts, budget, Letters())))
    half = budget // 2
    assert kept == (tokens if len(tokens) <= budget else tokens[:half] + tokens[-half:])
