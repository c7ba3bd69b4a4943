from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.workloads.metrics.rouge import common_subsequence, rouge_l

WORDS = st.lists(st.sampled_from("abcd"), max_size=8)


# Worked by hand. P and R count distinct words; F = 2PR / (P + R + 1e-8).
@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        # P = 3/3, R = 3/4
        ("the cat sat", "the cat sat down", 1.5 / 1.75),
        # repeated words count once: P = 2/2, R = 2/2
        ("a a b", "a b b", 1.0),
        # one of two in order: P = 1/2, R = 1/2
        ("b a", "a b", 0.5),
        # union over sentences: w1 w2, then w1 w3 w5; P = 4/8, R = 4/5
        ("w1 w2 w6 w7 w8. w1 w3 w8 w9 w5", "w1 w2 w3 w4 w5", 0.8 / 1.3),
        # of two longest subsequences of `a b` and `b a` the package takes `b`: P = 1/3, R = 1/2
        ("b a.b c", "a b", 0.4),
        # what one reference sentence found is not counted again: P = 1/1, R = 1/3
        ("x", "x y. x z", 0.5),
        # the blank after the full stop is a sentence of one empty word: P = 1/2, R = 1/1
        ("x. ", "x", 2 / 3),
        # case and punctuation count
        ("Cat", "cat", 0.0),
        ("cat,", "cat", 0.0),
        ("", "cat", 0.0),
        ("...", "cat", 0.0),
        ("cat", "", 0.0),
    ],
)
def test_golden(prediction: str, reference: str, expected: float) -> None:
    assert rouge_l(prediction, reference) == pytest.approx(expected, abs=1e-7)


def test_a_perfect_score_is_just_below_one() -> None:
    assert rouge_l("one two", "one two") == 2 / (2 + 1e-8)


def test_long_sentences_do_not_exhaust_the_stack() -> None:
    text = " ".join(str(number) for number in range(1100))
    assert rouge_l(text, text) == pytest.approx(1.0)


@given(WORDS, WORDS)
def test_common_subsequence_is_one_and_is_longest(left: list[str], right: list[str]) -> None:
    found = common_subsequence(left, right)
    assert _is_subsequence(found, left)
    assert _is_subsequence(found, right)
    assert len(found) == _longest("".join(left), "".join(right))


def _is_subsequence(candidate: list[str], whole: list[str]) -> bool:
    remaining = iter(whole)
    return all(word in remaining for word in candidate)


@cache
def _longest(left: str, right: str) -> int:
    if not left or not right:
        return 0
    if left[0] == right[0]:
        return 1 + _longest(left[1:], right[1:])
    return max(_longest(left[1:], right), _longest(left, right[1:]))
