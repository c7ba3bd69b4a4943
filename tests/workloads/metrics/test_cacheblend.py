"""CacheBlend's metrics against cases worked by hand."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.errors import ConfigError
from picbench.workloads.datasets import find
from picbench.workloads.metrics.cacheblend import stemmed_rouge_l, token_f1
from picbench.workloads.models import ModelSpec, load_tokenizer
from picbench.workloads.prompts.tokens import Tokenizer
from picbench.workloads.scoring import find_scorer


class Pairs:
    """A token is two letters; BOS is 0."""

    bos_token_id = 0

    def __call__(self, text: Any, *, add_special_tokens: bool) -> dict[str, Any]:
        assert not add_special_tokens
        return {
            "input_ids": [[self._id(one[i : i + 2]) for i in range(0, len(one), 2)] for one in text]
        }

    def decode(self, token_ids: Any) -> str:
        raise NotImplementedError

    def _id(self, pair: str) -> int:
        return 1 + sum(ord(letter) << 21 * place for place, letter in enumerate(pair))


# Texts are cut into `ab` `cd` ...; F1 = 2 * common / (said + wanted).
@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        ("abcd", "abcd", 1.0),
        # ab cd | ab ef
        ("abcd", "abef", 0.5),
        # ab cd ef | ab: half a word counts, which it would not in word F1
        ("abcdef", "ab", 0.5),
        # a multiset: ab ab ab | ab ab
        ("ababab", "abab", 0.8),
        # normalised: `ab` | `ab`
        ("The AB!", "ab", 1.0),
        # the first line counts
        ("\n\nabcd\nefgh", "abcd", 1.0),
        ("ab", "cd", 0.0),
        # nothing is left of one of the two, or of both
        ("", "ab", 0.0),
        ("the", "ab", 0.0),
        ("?!", "the", 1.0),
        # no more than Yes or No counts: ye s | ye s, no | no
        ("Yes, they were both", "yes", 1.0),
        ("yesterday", "yes", 1.0),
        ("  no, never", "No", 1.0),
        # the original's rule has no eye for words: `Norway` is read as `No`, no | no rw ay
        ("Norway", "Norway", 0.5),
    ],
)
def test_token_f1(prediction: str, reference: str, expected: float) -> None:
    assert token_f1(Pairs())(prediction, reference) == pytest.approx(expected, abs=1e-12)


@given(st.text(max_size=30), st.text(max_size=30))
def test_token_f1_is_a_share(prediction: str, reference: str) -> None:
    assert 0.0 <= token_f1(Pairs())(prediction, reference) <= 1.0


def test_a_real_tokenizer_splits_words(tiny_tokenizer: Tokenizer) -> None:
    metric = token_f1(tiny_tokenizer)
    assert metric("Westminster", "Westminster") == 1.0
    assert 0.0 < metric("Westminster Abbey", "Westminster") < 1.0


# P and R count words as often as they occur, over their longest common subsequence.
@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        # stems: `the cats were running` | `the cat was run`: the cat run of 4 and 4
        ("the cats were running", "the cat was run", 0.75),
        # order counts: `b` or `a` of 2 and 2
        ("bb aa", "aa bb", 0.5),
        # case and punctuation do not: P = 2/2, R = 2/3
        ("Hello, world", "hello world again", 0.8),
        # every time a word occurs: P = 2/3, R = 2/2
        ("cat cat dog", "cat cat", 0.8),
        # the lines are one text: P = 2/2, R = 2/2
        ("one.\ntwo.", "one two", 1.0),
        ("", "cat", 0.0),
        ("...", "cat", 0.0),
    ],
)
def test_stemmed_rouge_l(prediction: str, reference: str, expected: float) -> None:
    assert stemmed_rouge_l()(prediction, reference) == pytest.approx(expected, abs=1e-12)


def test_the_rules_differ_where_they_should(tiny_model: ModelSpec) -> None:
    tokenizer = load_tokenizer(tiny_model)
    musique, samsum = find("musique"), find("samsum")
    word, token = (
        find_scorer(musique, rule, lambda: tokenizer) for rule in ("longbench", "cacheblend")
    )
    assert (word.metric, token.metric) == ("f1", "f1 (CacheBlend)")
    assert word.score("Norway", ["x", "Norway"]) == 1.0
    assert token.score("Norway", ["x", "Norway"]) < 1.0
    plain, stemmed = (
        find_scorer(samsum, rule, lambda: tokenizer) for rule in ("longbench", "cacheblend")
    )
    assert (plain.metric, stemmed.metric) == ("rouge-l", "rouge-l (CacheBlend)")
    reply = "\nAda walks.\nDialogue: Ben: hi"
    assert plain.score(reply, ["Ada walked."]) == pytest.approx(0.5)
    assert stemmed.score(reply, ["Ada walked."]) == 1.0


def test_no_answers_no_score(tiny_tokenizer: Tokenizer) -> None:
    assert find_scorer(find("musique"), "cacheblend", lambda: tiny_tokenizer).score("x", []) == 0.0


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(ConfigError, match=r"rouge-score.*picbench\[cacheblend\]"):
        stemmed_rouge_l()
