"""Chunks and questions from rows and from random tokens."""

from dataclasses import replace
from typing import Any

import pytest

from picbench.errors import ConfigError
from picbench.workloads.sample import Sample, SampleSegment
from picbench.workloads.traffic.corpus import from_samples, from_tokens


def sample(tokenizer: Any, name: str, passages: list[str], question: str) -> Sample:
    def segment(kind: Any, text: str) -> SampleSegment:
        return SampleSegment(
            kind, text, tuple(tokenizer([text], add_special_tokens=False)["input_ids"][0])
        )

    segments = (
        segment("text", "head "),
        *(segment("chunk", p) for p in passages),
        segment("text", question),
    )
    return Sample(name, "fake", segments, (question,), max_tokens=7)


def test_rows_with_the_same_passages_are_one_topic(word_tokenizer: Any) -> None:
    rows = [
        sample(word_tokenizer, "a", ["one two ", "three four "], "why "),
        sample(word_tokenizer, "b", ["one two ", "three four "], "who "),
        sample(word_tokenizer, "c", ["five six ", "seven eight "], "when "),
    ]
    corpus = from_samples(rows, word_tokenizer, pool=4)
    assert [[c.text for c in topic.chunks] for topic in corpus.topics] == [
        ["one two ", "three four "],
        ["five six ", "seven eight "],
    ]
    assert [q.answers for q in corpus.topics[0].questions] == [("why ",), ("who ",)]
    assert (corpus.dataset, corpus.max_tokens) == ("fake", 7)


def test_a_joined_chunk_goes_on_where_its_first_passage_does(word_tokenizer: Any) -> None:
    made = sample(word_tokenizer, "a", ["one ", "two ", "three ", "four "], "why ")
    head, *passages, tail = made.segments
    known = [replace(p, before=SampleSegment("text", "x ", (n,))) for n, p in enumerate(passages)]
    rows = [replace(made, segments=(head, *known, tail))]
    corpus = from_samples(rows, word_tokenizer, pool=2, join=2)
    assert [chunk.context for chunk in corpus.topics[0].chunks] == [(0,), (2,)]
    assert corpus.renew(corpus.topics[0].chunks[1], 5).context == (2,)


def test_topics_stop_when_the_pool_is_full(word_tokenizer: Any) -> None:
    rows = [sample(word_tokenizer, f"{n}", [f"p{n} ", f"q{n} "], "why ") for n in range(5)]
    assert len(from_samples(rows, word_tokenizer, pool=3).topics) == 2
    with pytest.raises(ConfigError, match="the rows have 10 chunks, `pool` wants 11"):
        from_samples(rows, word_tokenizer, pool=11)


@pytest.mark.parametrize(
    ("join", "tokens", "texts"),
    [
        (1, 0, ["a ", "b b ", "c ", "d ", "e "]),
        (2, 0, ["a b b ", "c d e "]),
        (1, 3, ["a b b ", "c d e "]),
        (2, 4, ["a b b c ", "d e "]),
        (9, 0, ["a b b c d e "]),
    ],
)
def test_passages_are_joined_until_a_chunk_is_full(
    word_tokenizer: Any, join: int, tokens: int, texts: list[str]
) -> None:
    if (join, tokens) == (2, 4):
        texts = ["a b b c d e "]  # What is left over is too short and joins the chunk before.
    rows = [sample(word_tokenizer, "x", ["a ", "b b ", "c ", "d ", "e "], "why ")]
    corpus = from_samples(rows, word_tokenizer, pool=1, join=join, chunk_tokens=tokens)
    assert [chunk.text for chunk in corpus.topics[0].chunks] == texts
    assert "".join(texts) == "a b b c d e "


def test_renewed_chunks_start_with_a_number_of_their_own(word_tokenizer: Any) -> None:
    corpus = from_samples([sample(word_tokenizer, "x", ["a b "], "why ")], word_tokenizer, pool=1)
    chunk = corpus.topics[0].chunks[0]
    first, second = corpus.renew(chunk, 0), corpus.renew(chunk, 1)
    assert first.text == "Copy 0.\na b "
    assert first.tokens[-2:] == second.tokens[-2:] == chunk.tokens
    assert first.tokens[0] == second.tokens[0]
    assert first.tokens[1] != second.tokens[1]


def test_random_chunks_have_the_given_length_and_ids() -> None:
    corpus = from_tokens([5, 6, 7], seed=1, pool=12, chunk_tokens=33, max_tokens=2)
    chunks = [chunk for topic in corpus.topics for chunk in topic.chunks]
    assert len(chunks) == len(set(chunks)) == 12
    assert {len(chunk.tokens) for chunk in chunks} == {33}
    assert {token for chunk in chunks for token in chunk.tokens} == {5, 6, 7}
    again = from_tokens([5, 6, 7], seed=1, pool=12, chunk_tokens=33, max_tokens=2)
    assert again.topics == corpus.topics
    assert corpus.topics != from_tokens([5, 6, 7], 2, pool=12, chunk_tokens=33, max_tokens=2).topics
    assert len({corpus.renew(chunks[0], n).tokens for n in range(20)} | {chunks[0].tokens}) == 21
