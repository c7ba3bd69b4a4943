import pytest

from picbench.workloads.metrics.f1 import f1, words


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
