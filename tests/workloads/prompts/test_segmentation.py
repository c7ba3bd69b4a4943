from collections.abc import Callable, Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from picbench.errors import DataError
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
    try:
        chunks = cut(text)
    except DataError:
        assume(False)
    assert "".join(chunks) == text
    assert all(chunks)


@given(text=TEXTS, size=st.integers(1, 40))
def test_token_chunks_are_the_text_and_bounded(text: str, size: int) -> None:
    chunks = by_tokens(text, count_letters, size)
    assert "".join(chunks) == text
    assert all(0 < len(chunk) <= 2 * size for chunk in chunks)


@given(text=TEXTS, size=st.integers(1, 40))
def test_only_the_last_token_chunk_is_short(text: str, size: int) -> None:
    for chunk in by_tokens(text, count_letters, size)[:-1]:
        assert len(chunk) >= size


def test_passages_keep_their_marker() -> None:
    text = "Passage 1:\nOne\nsays Passage 2:\n more.\nPassage 2:\nTwo"
    assert passages(text) == ["Passage 1:\nOne\nsays Passage 2:\n more.\n", "Passage 2:\nTwo"]


QUOTING = st.lists(st.sampled_from(["x", "Passage 7:", "Passage 99:", "Passage 007: "]), max_size=4)


@given(bodies=st.lists(QUOTING, min_size=2, max_size=5), end=st.sampled_from(["\n", "\r\n"]))
def test_a_passage_that_quotes_a_mark_is_one(bodies: list[list[str]], end: str) -> None:
    blocks = [
        end.join([f"Passage {number}:", *lines, ""]) for number, lines in enumerate(bodies, start=1)
    ]
    assert passages("".join(blocks)) == articles("".join(blocks)) == blocks


@pytest.mark.parametrize(
    ("before", "quoted", "after"), [(1, 2, 2), (2, 2, 3), (3, 3, None), (1, 1, 2)]
)
def test_a_context_that_can_be_cut_in_two_ways_is_refused(
    before: int, quoted: int, after: int | None
) -> None:
    numbers = [*range(1, before + 1), quoted, *([] if after is None else [after])]
    with pytest.raises(DataError, match="two ways to cut"):
        passages("".join(f"Passage {number}:\nx\n" for number in numbers))


def test_marks_of_other_numbers_are_text() -> None:
    text = "Passage 1:\na\nPassage 1x:\nPassage 3:\nb\nPassage 2:\nPassage 1:\nPassage 3:\nc"
    assert passages(text) == [
        "Passage 1:\na\nPassage 1x:\nPassage 3:\nb\n",
        "Passage 2:\nPassage 1:\n",
        "Passage 3:\nc",
    ]
    huge = f"Passage {'9' * 5_000}:\n"
    assert passages(huge) == [huge]


def test_an_example_ends_with_its_summary() -> None:
    first = "Dialogue: A: hi\nDialogue: is what we have\nSummary: They talk.\n"
    assert dialogues(first + "Dialogue: B: yo\nSummary: x") == [
        first,
        "Dialogue: B: yo\nSummary: x",
    ]


def test_passages_may_quote_the_marks_of_articles() -> None:
    text = "Passage 1:\na ||||| b\nPassage 2:\nc"
    assert articles(text) == ["Passage 1:\na ||||| b\n", "Passage 2:\nc"]


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


CAPITAL = "\u5317\u4eac\u662f\u4e2d\u56fd\u7684\u9996\u90fd"  # Beijing is the capital of China
THAI = "\u0e09\u0e31\u0e19\u0e44\u0e1b\u0e15\u0e25\u0e32\u0e14"  # I go to the market


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (f"{CAPITAL}\u3002" * 3, 3),
        (f"{CAPITAL}\uff01\uff1f{CAPITAL}\uff1f{CAPITAL}", 3),
        (f"\u300c{CAPITAL}\u3002\u300d{CAPITAL}\uff0e", 2),
        (f"\u201c{CAPITAL}\uff01\u201d{CAPITAL}\u3002\n{CAPITAL}", 3),
        (f"{CAPITAL}!{CAPITAL}?{CAPITAL}.", 3),
        (f"{CAPITAL}\uff13\uff0e\uff15{CAPITAL}3.5{CAPITAL}", 1),
        (f"{THAI} {THAI}  {THAI}", 3),
        (f"{THAI} 7-Eleven {THAI}", 1),
        ("\u0930\u093e\u092e \u0917\u092f\u093e\u0964 \u0935\u0939\u0964", 2),
        ("\u0645\u0646\u061f \u0647\u0648.", 2),
    ],
)
def test_sentences_of_other_scripts(text: str, count: int) -> None:
    found = sentences(text)
    assert "".join(found) == text
    assert len(found) == count
    assert all(one.lstrip() == one for one in found)


@pytest.mark.parametrize("end", ["\u3002", "\uff01\u300d", "\uff0e", "\u3002\r\n"])
def test_chunks_of_chinese_end_with_a_sentence(end: str) -> None:
    chunks = by_tokens((CAPITAL + end) * 400, count_letters)
    assert all(chunk.endswith(end) for chunk in chunks)
    assert all(512 <= len(chunk) <= 1_024 for chunk in chunks[:-1])


def test_chunks_of_thai_end_at_a_space() -> None:
    chunks = by_tokens(f"{THAI} " * 400 + THAI, count_letters)
    assert all(chunk.endswith(f"{THAI} ") for chunk in chunks[:-1])


def test_a_long_chinese_sentence_is_cut_at_a_comma() -> None:
    chunks = by_tokens(f"{CAPITAL}\uff0c" * 400 + "\u3002", count_letters)
    assert all(chunk.endswith("\uff0c") for chunk in chunks[:-1])
