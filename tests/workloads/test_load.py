import json
from pathlib import Path
from typing import Any

import pytest

from picbench.errors import ConfigError, DataError
from picbench.workloads.datasets import find
from picbench.workloads.load import load_samples
from picbench.workloads.prompts.tokens import Tokenizer
from picbench.workloads.sample import Sample, SampleSegment
from picbench.workloads.sources.row import BadRows

CONTEXTS = {
    "musique": "Passage 1:\nAda lived in Oslo.\nPassage 2:\nOslo lies in Norway.",
    "2wikimqa": "Passage 1:\nBo made a film.\nPassage 2:\nBo was born in Rome.",
    "hotpotqa": "Passage 1:\nCy sang.\nPassage 2:\nDi danced.",
    "samsum": "Dialogue: A: hi\nSummary: A greets.\nDialogue: B: bye\nSummary: B leaves.",
    "multi_news": "Passage 1:\nRain fell.\nPassage 2:\nIt rained all day.",
    "needle": "The sky is grey. The key is under the mat. " * 60,
}


def row(dataset: str, index: int = 0, **fields: Any) -> dict[str, Any]:
    made = {
        "input": f"Question {index}?",
        "context": CONTEXTS[dataset],
        "answers": ["Norway", "in Norway"],
        "_id": f"row{index}",
    }
    return made | fields


@pytest.fixture
def data(write_rows: Any) -> Path:
    folder: Path = write_rows("musique", *(row("musique", index) for index in range(8)))
    return folder


@pytest.mark.parametrize("dataset", CONTEXTS)
def test_every_dataset_becomes_text_chunks_text(
    dataset: str, write_rows: Any, word_tokenizer: Tokenizer
) -> None:
    folder = write_rows(dataset, row(dataset))
    (sample,) = load_samples(dataset, folder, word_tokenizer)
    assert [segment.kind for segment in sample.segments] == ["text", "chunk", "chunk", "text"]
    assert "".join(chunk.text for chunk in sample.chunks) == CONTEXTS[dataset]
    assert "Question 0?" in sample.segments[-1].text
    assert (sample.id, sample.dataset, sample.answers) == ("row0", dataset, ("Norway", "in Norway"))
    assert sample.max_tokens == find(dataset).max_tokens
    assert sample.source.endswith("rows.jsonl:1")
    assert not sample.truncated
    # Without marks between chunks they are parts of one text.
    assert sample.ordered == (dataset == "needle")


def test_passages_without_marks_are_consecutive_text(
    write_rows: Any, word_tokenizer: Tokenizer
) -> None:
    folder = write_rows("musique", row("musique", context=CONTEXTS["needle"]))
    (sample,) = load_samples("musique", folder, word_tokenizer)
    assert sample.ordered


def test_segments_are_tokenized_alone_with_one_bos(data: Path, word_tokenizer: Tokenizer) -> None:
    sample = load_samples("musique", data, word_tokenizer)[0]
    assert sample.tokens[0] == 0
    assert sample.tokens.count(0) == 1
    for index, segment in enumerate(sample.segments):
        alone = word_tokenizer([segment.text], add_special_tokens=False)["input_ids"][0]
        assert list(segment.tokens) == [0] * (index == 0) + alone


@pytest.mark.parametrize("bos", [(None, True), (0, False)])
def test_no_bos_where_the_tokenizer_prepends_none(
    bos: tuple[int | None, bool], data: Path, make_tokenizer: Any
) -> None:
    assert 0 not in load_samples("musique", data, make_tokenizer(*bos))[0].tokens


def test_empty_segments_are_dropped_but_not_the_bos(
    data: Path, tmp_path: Path, word_tokenizer: Tokenizer
) -> None:
    prompts = tmp_path / "prompts.json"
    prompts.write_text('{"musique": "{context}"}', encoding="utf-8")
    sample = load_samples("musique", data, word_tokenizer, prompts=prompts)[0]
    assert sample.segments[0] == SampleSegment("text", "", (0,))
    assert [segment.kind for segment in sample.segments] == ["text", "chunk", "chunk"]


def test_a_prompt_file_brings_templates_and_lengths(
    data: Path, tmp_path: Path, word_tokenizer: Tokenizer
) -> None:
    prompts = tmp_path / "prompts.json"
    content = {
        "dataset2prompt": {"musique": "{context} Q {input}"},
        "dataset2maxlen": {"musique": 5},
    }
    prompts.write_text(json.dumps(content), encoding="utf-8")
    sample = load_samples("musique", data, word_tokenizer, prompts=prompts)[0]
    assert sample.segments[-1].text == " Q Question 0?"
    assert sample.max_tokens == 5
    louder = load_samples("musique", data, word_tokenizer, prompts=prompts, max_tokens=7)[0]
    assert louder.max_tokens == 7


def test_the_first_rows_are_taken_unless_a_seed_shuffles(
    data: Path, word_tokenizer: Tokenizer
) -> None:
    def ids(**options: Any) -> list[str]:
        return [one.id for one in load_samples("musique", data, word_tokenizer, **options)]

    assert ids(limit=3) == ["row0", "row1", "row2"]
    assert ids(limit=3, seed=7) == ids(limit=3, seed=7)
    assert ids(seed=7) != ids()
    assert sorted(ids(seed=7)) == ids()
    assert ids(limit=3, seed=7) == ids(seed=7)[:3]


def test_ids_are_unique(write_rows: Any, word_tokenizer: Tokenizer) -> None:
    folder = write_rows("musique", *(row("musique") for _ in range(3)))
    samples = load_samples("musique", folder, word_tokenizer)
    assert [one.id for one in samples] == ["row0", "row0~2", "row0~3"]


def test_a_long_prompt_loses_its_middle(write_rows: Any, word_tokenizer: Tokenizer) -> None:
    passages = "\n".join(f"Passage {index}:\n" + "word " * 50 for index in range(1, 11))
    folder = write_rows("musique", row("musique", context=passages))
    whole = load_samples("musique", folder, word_tokenizer)[0]
    (cut,) = load_samples("musique", folder, word_tokenizer, context=332, max_tokens=32)
    assert whole.prompt_tokens > 500
    assert cut.truncated
    assert cut.tokens == whole.tokens[:150] + whole.tokens[-150:]
    assert len(cut.chunks) < len(whole.chunks)


def test_a_context_without_room_is_refused(data: Path, word_tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="`max_tokens`"):
        load_samples("musique", data, word_tokenizer, context=32)


def test_needles_fit_the_context(tmp_path: Path, word_tokenizer: Tokenizer) -> None:
    (tmp_path / "a.txt").write_text("Some text that is dull. " * 3000, encoding="utf-8")
    samples = load_samples("needle", tmp_path, word_tokenizer, limit=30, context=3000)
    assert not any(sample.truncated for sample in samples)
    assert max(sample.prompt_tokens for sample in samples) > 2500


def test_bad_rows_stop_or_are_skipped(data: Path, word_tokenizer: Tokenizer) -> None:
    file = data / "musique" / "rows.jsonl"
    file.write_text(file.read_text(encoding="utf-8") + "nonsense\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"rows\.jsonl:9"):
        load_samples("musique", data, word_tokenizer)
    bad = BadRows(skip=True)
    assert len(load_samples("musique", data, word_tokenizer, bad_rows=bad)) == 8
    assert len(bad.skipped) == 1


def test_an_unknown_data_set_is_refused(tmp_path: Path, word_tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="did you mean 'musique'"):
        load_samples("musiqe", tmp_path, word_tokenizer)


def test_an_empty_file_is_refused(write_rows: Any, word_tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="no rows for 'musique'"):
        load_samples("musique", write_rows("musique"), word_tokenizer)


def test_a_file_of_malformed_rows_names_the_first(
    tmp_path: Path, word_tokenizer: Tokenizer
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("nonsense\n{}\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"no rows.*malformed.*rows\.jsonl:1"):
        load_samples("musique", file, word_tokenizer, bad_rows=BadRows(skip=True))


def test_a_prompt_is_its_segments_in_order() -> None:
    segments = (
        SampleSegment("text", "s", (1, 2)),
        SampleSegment("chunk", "c", (3,)),
        SampleSegment("chunk", "d", (4, 5)),
    )
    sample = Sample("x", "musique", segments, ("a",), 4)
    assert [chunk.tokens for chunk in sample.chunks] == [(3,), (4, 5)]
    assert sample.tokens == (1, 2, 3, 4, 5)
    assert sample.prompt_tokens == 5
