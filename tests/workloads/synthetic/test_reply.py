"""Reading the answer out of a reply that restates the question."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.workloads.synthetic.reply import MAX_TOKENS, answer, compose, extract


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        (" director of The Silver Lantern is Mara Iskova", "Mara Iskova"),
        ("director of X is Y Z; home of Y Z is Port Velin\n\nQ: more", "Port Velin"),
        ("country of A is B; country of C is B; same is yes", "yes"),
        ("birth year of A is 1901; birth year of B is 1900; first is 1900; earlier is B", "B"),
        ("Mara Iskova", "Mara Iskova"),
        (" home of Y is Odrin.", "Odrin"),
        ("home of Y is", "home of Y is"),
        ("", ""),
        ("\n\n", ""),
    ],
)
def test_the_answer_follows_the_last_is(reply: str, found: str) -> None:
    assert extract(reply) == found


@given(st.lists(st.from_regex(r"[a-z]+ of [A-Z][a-z]+ is [A-Z][a-z]+", fullmatch=True), min_size=1))
def test_composing_and_extracting_are_inverse(steps: list[str]) -> None:
    assert extract(compose(steps)) == steps[-1].split(" is ")[1]


def test_summaries_are_scored_whole() -> None:
    text = " A court is told. Mara is here."
    assert answer("multi_news", text) == "A court is told. Mara is here."
    assert answer("samsum", text) == "A court is told. Mara is here."
    assert answer("needle", text) == "here"
    assert set(MAX_TOKENS) >= {"musique", "needle", "samsum"}
