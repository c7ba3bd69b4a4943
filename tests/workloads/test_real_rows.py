"""Rows of the real data sets, where a folder with them is at hand."""

from pathlib import Path

import pytest

from picbench.workloads.datasets import Reading, find
from picbench.workloads.load import load_samples
from picbench.workloads.scoring import score
from picbench.workloads.tokens import Tokenizer

NAMES = ["2wikimqa", "hotpotqa", "multi_news", "musique", "needle", "samsum"]


@pytest.mark.parametrize("dataset", NAMES)
def test_rows_load_segment_and_score(
    dataset: str, real_data: Path, word_tokenizer: Tokenizer
) -> None:
    rows = {
        row.id: row
        for row in find(dataset).rows(real_data, Reading(lambda texts: [len(t) for t in texts]))
    }
    samples = load_samples(dataset, str(real_data), word_tokenizer, limit=12)
    for sample in samples:
        assert len(sample.chunks) > 1 or dataset == "multi_news"
        assert sample.parts[0].kind == sample.parts[-1].kind == "text"
        assert score(dataset, sample.answers[0], sample.answers) > 0.9
        if dataset != "needle":
            assert "".join(chunk.text for chunk in sample.chunks) == rows[sample.id].context


def test_every_row_is_well_formed(real_data: Path) -> None:
    for dataset in NAMES:
        rows = list(find(dataset).rows(real_data, Reading(lambda texts: [len(t) for t in texts])))
        assert len({row.id for row in rows}) == len(rows) >= 100


def test_longbenchs_prompt_file(real_data: Path, word_tokenizer: Tokenizer) -> None:
    prompts = real_data / "longbench_prompts.json"
    if not prompts.is_file():
        pytest.skip("no prompt file beside the rows")
    (sample,) = load_samples("samsum", str(real_data), word_tokenizer, limit=1, prompts=prompts)
    assert sample.parts[0].text.endswith("examples.\n\n")
    assert sample.max_tokens == 128


@pytest.mark.parametrize("dataset", NAMES)
def test_the_built_in_tokenizer_takes_real_text(
    dataset: str, real_data: Path, tiny_tokenizer: Tokenizer
) -> None:
    for sample in load_samples(dataset, str(real_data), tiny_tokenizer, limit=2, context=16_384):
        assert sample.prompt_tokens <= 16_384 - sample.max_tokens
        assert all(0 <= token < 2048 for token in sample.tokens)
        if not sample.truncated:
            assert tiny_tokenizer.decode(sample.tokens[1:]) == "".join(p.text for p in sample.parts)
