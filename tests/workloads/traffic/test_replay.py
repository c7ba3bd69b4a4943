"""Requests of any file as samples: the same tokens and chunks that are counted."""

import json
from pathlib import Path
from typing import Any

import pytest

from picbench.errors import DataError
from picbench.workloads import models
from picbench.workloads.prompts.tokens import Tokenizer, encode
from picbench.workloads.traffic.replay import open_requests


def load() -> Tokenizer:
    return models.plain_tokenizer(models.resolve("testbed"))


def written(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_texts_of_a_log_are_served_with_chunks_found(tmp_path: Path) -> None:
    one, other = "Ada Lovelace wrote the first program. " * 8, "Oslo is a city in Norway. " * 9
    texts = [f"{one}{other}Who?", f"{other}{one}Where?"]
    lines = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    found = open_requests(written(tmp_path / "t.jsonl", lines), load)
    first, second = found.stream.samples
    assert (found.header.dataset, found.header.synthetic) == ("log", False)
    assert {chunk.tokens for chunk in first.chunks} == {chunk.tokens for chunk in second.chunks}
    assert len(first.chunks) == 2
    assert (first.max_tokens, first.source) == (16, f"{tmp_path / 't.jsonl'}:1")
    # The prompt is the text, whatever was found in it, after the BOS.
    assert first.tokens[1:] == encode(load(), [f"{texts[0]}\n"])[0]
    assert found.stream.arrivals is None


def test_lengths_become_random_tokens_that_recur_with_their_name(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 1000 * time, "input_length": 600, "output_length": 2, "hash_ids": [0, last]}
        for time, last in ((3, 1), (4, 2))
    ]
    found = open_requests(written(tmp_path / "t.jsonl", lines), load)
    first, second = (sample.tokens for sample in found.stream.samples)
    assert (found.header.dataset, found.header.synthetic) == ("synthetic", True)
    assert first[:512] == second[:512]
    assert first[512:] != second[512:]
    assert (len(first), found.stream.arrivals) == (600, (0, 1))
    again = open_requests(tmp_path / "t.jsonl", load)
    assert (again.stream, again.fingerprint) == (found.stream, found.fingerprint)


def test_times_of_some_requests_are_refused_with_their_place(tmp_path: Path) -> None:
    lines = [{"parts": [{"tokens": 9}], "arrival": 1}, {"parts": [{"tokens": 9}]}]
    with pytest.raises(DataError, match=r"t\.jsonl:2: field 'arrival': some requests have"):
        open_requests(written(tmp_path / "t.jsonl", lines), load)
