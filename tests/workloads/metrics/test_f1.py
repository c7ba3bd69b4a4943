import pytest

from picbench.workloads.datasets import find
from picbench.workloads.metrics.f1 import exact_match, f1, string_match, wordless, words
from picbench.workloads.metrics.rouge import rouge_l


@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        ("Eiffel Tower", "eiffel tower", 1.0),
        # 2 of 3 said, 2 of 2 wanted
        ("The Eiffel Tower, Paris", "eiffel tower", 0.8),
        # words are a multiset: one `no` and one `yes` are shared, of three each
        ("no no yes", "no yes yes", 2 / 3),
        # order does not count
        ("tower eiffel", "Eiffel Tower!", 1.0),
        # 1 of 4, 1 of 1
        ("it was in 1931", "1931", 0.4),
        ("Paris", "London", 0.0),
        ("", "London", 0.0),
        # nothing is left of either
        ("the", "a", 0.0),
        ("?!", "?!", 0.0),
    ],
)
def test_golden(prediction: str, reference: str, expected: float) -> None:
    assert f1(prediction, reference) == pytest.approx(expected, abs=1e-12)


def test_punctuation_goes_before_articles_and_joins_what_it_stood_between() -> None:
    assert words("The well-known A-B  of\tan  'author'") == ["wellknown", "ab", "of", "author"]


def test_only_ascii_punctuation_goes() -> None:
    assert words("“Zoë”, né 1931.") == ["“zoë”", "né", "1931"]


@pytest.mark.parametrize("reply", ["", "The", "-", "A", "a an the", "B"])
@pytest.mark.parametrize("gold", ["A", "", " ", "-", "The", "\u200b", "\u2014"])
def test_no_reply_matches_an_answer_without_a_word(reply: str, gold: str) -> None:
    assert wordless(gold)
    assert exact_match(reply, gold) == 0.0
    for metric in (exact_match, f1, rouge_l, lambda *_: 1.0):
        assert find("qa").best(metric, reply, [gold]) == 0.0


def test_an_exact_match_has_the_words_in_order() -> None:
    assert exact_match("The Eiffel Tower!", "eiffel tower") == 1.0
    assert exact_match("tower eiffel", "eiffel tower") == 0.0
    assert exact_match("", "Oslo") == 0.0


def test_a_string_match_counts_parts_in_any_order() -> None:
    assert string_match("7, eleven: 13", "13, 7") == 1.0
    assert string_match("7", "13, 7,") == 0.5
    assert string_match("thirteen", "13") == string_match("13", " , ") == 0.0


@pytest.mark.parametrize(
    ("reply", "gold"),
    [
        ("Zoe\u0308", "Zo\u00eb"),
        ("\u1100\u1161\u11a8", "\uac01"),
        ("\u200f\u0642\u0631\u0629\u200f", "\u0642\u0631\u0629"),
        ("\ufeffOslo", "Os\u00adlo"),
        ("1,000", "1000"),
    ],
)
def test_texts_that_look_the_same_are_the_same(reply: str, gold: str) -> None:
    assert find("qa").score(reply, [gold]) == find("qa").score(gold, [reply]) == 1.0


def test_joiners_tell_words_apart() -> None:
    """Persian writes a word with a joiner that is another one without it."""
    assert (
        find("qa").score("\u0645\u06cc\u200c\u0631\u0648\u0645", ["\u0645\u06cc\u0631\u0648\u0645"])
        == 0.0
    )
