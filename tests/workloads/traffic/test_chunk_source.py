"""Corpora of bundled rows: contexts with several questions, all of them answered in the context."""

import json
from pathlib import Path

import pytest

from picbench.errors import ConfigError
from picbench.workloads.prompts.tokens import Tokenizer
from picbench.workloads.traffic.chunk_source import ChunkSource, build, topic_file


@pytest.mark.parametrize("dataset", ["musique", "hotpotqa", "2wikimqa"])
def test_every_question_has_its_answer_in_the_context(tmp_path: Path, dataset: str) -> None:
    file = topic_file(dataset, topics=6, passages=6, questions=5, directory=tmp_path)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len({row["context"] for row in rows}) == 6
    assert len({(row["context"], row["input"]) for row in rows}) == len(rows) >= 20
    assert len({row["_id"] for row in rows}) == len(rows)
    single = [row for row in rows if row["qtype"] == "1-hop"]
    assert all(row["answers"][0] in row["context"] for row in single)
    assert topic_file(dataset, topics=6, passages=6, questions=5, directory=tmp_path) == file


def test_what_has_no_questions_over_passages_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`dataset` samsum"):
        topic_file("samsum", topics=1, passages=4, questions=1, directory=tmp_path)
    with pytest.raises(ConfigError, match="`passages` 11: contexts of hotpotqa have 2 to 10"):
        topic_file("hotpotqa", topics=1, passages=11, questions=1, directory=tmp_path)


def test_bundled_topics_have_the_configured_chunks(
    tiny_tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = ChunkSource(dataset="musique", pool=7, passages=4, join=2, questions=3)
    corpus = build(source, tiny_tokenizer, seed=0)
    assert {len(topic.chunks) for topic in corpus.topics} == {2}
    assert len(corpus.topics) == 4
    assert all(len(topic.questions) == 3 for topic in corpus.topics)
    assert corpus.dataset == "musique"


def test_random_tokens_keep_clear_of_special_ones(tiny_tokenizer: Tokenizer) -> None:
    corpus = build(
        ChunkSource(dataset="synthetic", pool=3, chunk_tokens=64), tiny_tokenizer, seed=5
    )
    used = {
        token for topic in corpus.topics for segment in topic.chunks for token in segment.tokens
    }
    special: set[int] = set(tiny_tokenizer.all_special_ids)  # type: ignore[attr-defined]
    assert special
    assert not used & special
    assert [len(topic.chunks[0].tokens) for topic in corpus.topics] == [64] * 3


@pytest.mark.parametrize("values", [{"pool": 0}, {"join": 0}, {"questions": 0}])
def test_settings_that_cannot_be_name_their_field(values: dict[str, int]) -> None:
    [name] = values
    with pytest.raises(ConfigError, match=f"`{name}` 0"):
        ChunkSource(dataset="musique", **values)  # type: ignore[arg-type]
