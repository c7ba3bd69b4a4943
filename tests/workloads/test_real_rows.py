"""Rows of the real data sets, where a folder with them is at hand."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from picbench.errors import DataError
from picbench.workloads.datasets import Reading, find
from picbench.workloads.load import load_samples
from picbench.workloads.models import ModelSpec, load_tokenizer
from picbench.workloads.prompts.tokens import Tokenizer
from picbench.workloads.sample import Sample
from picbench.workloads.scoring import find_scorer
from picbench.workloads.sources.source import RowSource

NAMES = ["2wikimqa", "hotpotqa", "multi_news", "musique", "needle", "samsum"]

#: Every file of rows, and how many chunks a row of it has; None: as many as the row says.
FILES = {
    "2wikimqa/2wikimqa_original.jsonl": 10,
    "2wikimqa/2wikimqa_cacheblend.jsonl": 10,
    "musique/musique_original.jsonl": 20,
    "musique/musique_cacheblend.jsonl": 10,
    "hotpotqa/hotpotqa_distractor.jsonl": 10,
    "samsum/samsum_fewshot.jsonl": None,
    "multi_news/multi_news.jsonl": None,
}


def count_words(texts: Sequence[str]) -> list[int]:
    return [len(text.split()) for text in texts]


def dataset_of(file: str) -> str:
    return file.split("/")[0]


def chunks_of(row: dict[str, Any]) -> int:
    """How many chunks a row says that it has."""
    marks: int = row.get("n_demos") or row["context"].count("Passage ")
    return marks


@pytest.mark.parametrize("file", FILES)
def test_every_row_loads_and_is_cut_at_its_marks(file: str, real_data: Path) -> None:
    dataset = find(dataset_of(file))
    lines = (real_data / file).read_text(encoding="utf-8").splitlines()
    rows = list(dataset.rows(RowSource(real_data / file), Reading(count_words)))
    assert len({row.id for row in rows}) == len(rows) == len(lines) > 0
    for row, line in zip(rows, lines, strict=True):
        chunks = dataset.split(row.context, count_words)
        assert "".join(chunks) == row.context
        wanted = FILES[file]
        if wanted is None:
            wanted = chunks_of(json.loads(line))
        assert len(chunks) == wanted, row.source


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("rule", ["longbench", "cacheblend"])
def test_every_answer_scores_fully(
    file: str, rule: Any, real_data: Path, tiny_tokenizer: Tokenizer
) -> None:
    dataset = find(dataset_of(file))
    scorer = find_scorer(dataset, rule, lambda: tiny_tokenizer)
    for row in dataset.rows(RowSource(real_data / file), Reading(count_words)):
        reply = " ".join(row.answers[0].split())
        found = scorer.score(reply, [reply])
        # CacheBlend reads no more than No of an answer such as Norway.
        assert found > 0.99 or (rule == "cacheblend" and reply.lower().startswith(("no", "yes")))


@pytest.mark.parametrize(
    "file", ["samsum/raw/samsum_test.jsonl", "2wikimqa/raw/hipporag_2wikimultihopqa_corpus.json"]
)
def test_raw_forms_are_refused_by_file_and_row(file: str, real_data: Path) -> None:
    with pytest.raises(
        DataError, match=rf"{file}(:| row )1: .*a row needs input, context and answers"
    ):
        list(find(dataset_of(file)).rows(RowSource(real_data / file), Reading(count_words)))


@pytest.mark.parametrize("dataset", [name for name in NAMES if name != "needle"])
def test_longbenchs_prompts(dataset: str, real_data: Path, word_tokenizer: Tokenizer) -> None:
    prompts = real_data / "longbench_prompts.json"
    texts = json.loads(prompts.read_text(encoding="utf-8"))
    samples = load_samples(dataset, real_data, word_tokenizer, limit=12, prompts=prompts)
    rows = {row.id: row for row in find(dataset).rows(RowSource(real_data), Reading(count_words))}
    own = load_samples(dataset, real_data, word_tokenizer, limit=12)
    for sample, ours in zip(samples, own, strict=True):
        row = rows[sample.id]
        whole = texts["dataset2prompt"][dataset].format(context=row.context, input=row.input)
        assert read(sample) == whole
        assert sample.chunks == ours.chunks
        assert sample.max_tokens == texts["dataset2maxlen"][dataset]


def test_the_testbeds_tokenizer_takes_real_text(real_data: Path) -> None:
    folder = Path(__file__).parents[2] / "workloads" / "testbed" / "model"
    tokenizer = load_tokenizer(ModelSpec("testbed", folder))
    for dataset in NAMES:
        (sample,) = load_samples(dataset, real_data, tokenizer, limit=1, context=4_096)
        assert sample.prompt_tokens <= 4_096 - sample.max_tokens


def read(sample: Sample) -> str:
    return "".join(segment.text for segment in sample.segments)
