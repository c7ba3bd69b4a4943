from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.workloads.prompts.segmentation import (
    articles,
    by_tokens,
    dialogues,
    passages,
    sentences,
)

MARKS = ["Passage 1:\n", "Passage 22:\n", "Dialogue:", "|||||", "Passage"]
ENDS = ["\n", "\n\n", "\r\n", " ", ".", "! ", 'said." ', "日本。", "\u2028"]
WORDS = ["word", "longerword", "é", "3.5"]
TEXTS = st.lists(st.sampled_from(MARKS + ENDS + WORDS) | st.text(max_size=5), max_size=60).map(
    "".join
)


def count_letters(texts: Sequence[str]) -> list[int]:
    return [len(text) for text in texts]


def count_words(texts: Sequence[str]) -> list[int]:
    return [len(text.split()) for text in texts]


@pytest.mark.parametrize("cut", [passages, dialogues, articles, sentences])
@given(text=TEXTS)
def test_chunks_are_the_text(cut: Callable[[str], list[str]], text: str) -> None:
    chunks = cut(text)
    assert "".join(chunks) == text
    assert all(chunks)


@given(text=TEXTS, size=st.integers(1, 40))
def test_token_chunks_are_the_text_and_bounded(text: str, size: int) -> None:
    chunks = by_tokens(text, count_letters, size)
    assert "".join(chunks) == text
    assert all(0 < len(chunk) <= 2 * size for chunk in chunks)


@given(text=TEXTS, size=st.integers(1, 40))
def test_only_the_last_token_chunk_is_short(text: str, size: int) -> None:
    for chunk in by_tokens(text, count_words, size)[:-1]:
        assert count_words([chunk]) >= [size] or chunk.isspace()


def test_passages_keep_their_marker() -> None:
    text = "Passage 1:\nOne\nsays Passage 2:\n more.\nPassage 10:\nTwo"
    assert passages(text) == ["Passage 1:\nOne\nsays Passage 2:\n more.\n", "Passage 10:\nTwo"]


def test_text_before_the_first_passage_is_a_chunk() -> None:
    assert passages("Intro\nPassage 1:\nOne") == ["Intro\n", "Passage 1:\nOne"]


def test_dialogues_are_cut_at_line_starts() -> None:
    text = (
        "Dialogue: A: hi\r\nB: yo\nSummary: They greet.\nDialogue: A: Dialogue: what?\nSummary: x"
    )
    assert dialogues(text) == [
        "Dialogue: A: hi\r\nB: yo\nSummary: They greet.\n",
        "Dialogue: A: Dialogue: what?\nSummary: x",
    ]


def test_articles_by_either_mark() -> None:
    assert articles("Passage 1:\na\nPassage 2:\nb") == ["Passage 1:\na\n", "Passage 2:\nb"]
    assert articles("one ||||| two") == ["one ", "||||| two"]


def test_sentences_end_behind_quotes_and_blanks_but_not_in_numbers() -> None:
    text = 'He said "no." Then 3.5 people left!  Why?\n\nNobody knows'
    assert sentences(text) == [
        'He said "no." ',
        "Then 3.5 people left!  ",
        "Why?\n\n",
        "Nobody knows",
    ]


def test_chunks_are_extended_to_the_end_of_a_sentence() -> None:
    text = "one two three. four five six. seven eight nine. ten"
    assert by_tokens(text, count_words, 4) == [
        "one two three. four five six. ",
        "seven eight nine. ten",
    ]


def test_a_sentence_beyond_twice_the_size_is_cut_at_a_word() -> None:
    text = " ".join(str(number) for number in range(10)) + ". End."
    assert by_tokens(text, count_words, 3) == ["0 1 2 3 4 5 ", "6 7 8 9. ", "End."]


def test_no_text_no_chunks() -> None:
    assert by_tokens("", count_words) == []
