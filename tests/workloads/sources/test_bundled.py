"""Rows that picbench generates."""

from pathlib import Path
from typing import Any

import pytest

from picbench.errors import ConfigError
from picbench.workloads import datasets
from picbench.workloads.load import load_samples
from picbench.workloads.sources.bundled import COUNT, bundled_file


@pytest.mark.parametrize("dataset", ["musique", "2wikimqa", "hotpotqa", "samsum", "multi_news"])
def test_every_data_set_has_rows_with_chunks(
    dataset: str, word_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    samples = load_samples(dataset, bundled_file(dataset), word_tokenizer, limit=3)
    assert len(samples) == 3
    assert all(len(sample.chunks) >= 2 and sample.answers for sample in samples)


def test_rows_are_written_once_and_whole(tmp_path: Path) -> None:
    file = bundled_file("musique", tmp_path)
    assert len(file.read_text(encoding="utf-8").splitlines()) == COUNT
    written = file.stat().st_mtime_ns
    assert bundled_file("musique", tmp_path) == file
    assert file.stat().st_mtime_ns == written
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_a_data_set_without_a_generator_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no bundled rows for 'squad'"):
        bundled_file("squad", tmp_path)


def test_all_data_sets_are_covered(tmp_path: Path) -> None:
    # Rows of `qa` are those that a user names; those that the seed makes need no file.
    for name in set(datasets.names()) - {"qa"}:
        if not datasets.find(name).generated:
            assert bundled_file(name, tmp_path).exists()
