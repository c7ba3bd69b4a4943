"""The tokenizer that ships with the testbed model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenization import VOCABULARY, train
from tokenizers import Tokenizer

from picbench.workloads.synthetic import names
from picbench.workloads.testbed import model_path
from picbench.workloads.testbed.prompt import BOS, SPECIAL, ids_of

TOKENIZER = Tokenizer.from_file(str(model_path() / "tokenizer.json"))


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back(text: str) -> None:
    assert TOKENIZER.decode(encode(text), skip_special_tokens=False) == text


@given(st.lists(st.sampled_from(["\n", " ", "a", "Tesk", "\t", "\n\n", "  "])))
def test_any_white_space_comes_back(texts: list[str]) -> None:
    text = "".join(texts)
    assert TOKENIZER.decode(encode(text)) == text


def test_special_tokens_are_reserved_and_a_prompt_begins_with_bos() -> None:
    assert ids_of(TOKENIZER, SPECIAL) == list(range(len(SPECIAL)))
    assert TOKENIZER.encode("Passage 1:").ids[0] == ids_of(TOKENIZER, [BOS])[0]
    assert len(SPECIAL) < TOKENIZER.get_vocab_size() <= VOCABULARY


@pytest.mark.parametrize("kind", ["women", "men", "families", "towns", "lands", "rivers"])
def test_names_have_one_or_two_tokens_a_word(kind: str) -> None:
    assert max(len(encode(f" {word}")) for word in names.words(kind)) <= 2


def test_a_name_is_the_same_in_a_title_and_in_a_sentence() -> None:
    title, sentence = encode("Passage 1:\nMara Iskova\n"), encode("by Mara Iskova")
    assert title[-3:-1] == sentence[-2:]


def test_training_again_gives_the_same_vocabulary() -> None:
    first, second = (train(400, examples=4).get_vocab() for _ in range(2))
    assert first == second
    assert len(first) == 400
