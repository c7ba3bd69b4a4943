"""Request files: what is written is read, and what is wrong is named."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from picbench.errors import ConfigError, DataError
from picbench.workloads.sample import SampleSegment
from picbench.workloads.traffic.corpus import from_tokens
from picbench.workloads.traffic.draw import Stream, draw
from picbench.workloads.traffic.file import (
    Header,
    check_tokens,
    read_requests,
    write_requests,
)
from picbench.workloads.traffic.settings import Traffic

CORPUS = from_tokens(range(10, 500), 0, pool=9, chunk_tokens=20, max_tokens=4)
HEADER = Header(dataset="synthetic", synthetic=True, settings={"seed": 3})

REQUEST = {
    "request": "r0",
    "max_tokens": 2,
    "parts": [{"tokens": [1]}, {"chunk": "c0"}, {"tokens": [2]}],
}
CHUNK = {"chunk": "c0", "tokens": [5, 6]}
HEAD = {"format": "picbench-requests", "version": 1, "dataset": "x", "synthetic": False}


def by_hand(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@given(
    requests=st.integers(1, 20),
    seed=st.integers(0, 99),
    cached=st.floats(0, 1) | st.none(),
    users=st.integers(1, 9) | st.none(),
    rate=st.floats(0.1, 9) | st.none(),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
def test_what_is_written_is_read(tmp_path: Path, **values: Any) -> None:
    stream = draw(Traffic(chunks=(2, 4), **values), CORPUS)
    path = tmp_path / "deep" / "requests.jsonl"
    fingerprint = write_requests(path, HEADER, stream)
    first = path.read_bytes()
    found = read_requests(path)
    assert found.fingerprint == fingerprint == found.header.sha256
    assert found.header.settings == {"seed": 3}
    assert (found.stream.users, found.stream.arrivals) == (stream.users, stream.arrivals)
    assert [s.segments for s in found.stream.samples] == [s.segments for s in stream.samples]
    assert [(s.id, s.answers, s.max_tokens) for s in found.stream.samples] == [
        (s.id, s.answers, s.max_tokens) for s in stream.samples
    ]
    assert set(found.stream.preload) == set(stream.preload)
    assert write_requests(path, HEADER, stream) == fingerprint
    assert path.read_bytes() == first


def test_a_file_written_by_hand_is_read(tmp_path: Path) -> None:
    path = by_hand(tmp_path / "r.jsonl", HEAD, CHUNK | {"preload": True}, REQUEST)
    stream = read_requests(path).stream
    [sample] = stream.samples
    assert sample.tokens == (1, 5, 6, 2)
    assert sample.source == f"{path}:3"
    assert stream.preload == (SampleSegment("chunk", "", (5, 6)),)
    assert stream.arrivals is None


def test_documents_are_written_and_read(tmp_path: Path, word_tokenizer: Any) -> None:
    """The same chunk in two documents is two chunks."""
    ids = tuple(word_tokenizer(["a b "], add_special_tokens=False)["input_ids"][0])
    plain = SampleSegment("chunk", "", (7,))
    known = replace(plain, before=SampleSegment("text", "a b ", ids))
    sample = replace(draw(Traffic(requests=1), CORPUS).samples[0], segments=(plain, known))
    path = tmp_path / "r.jsonl"
    write_requests(path, HEADER, Stream((sample,), (0,), preload=(known,)))
    found = read_requests(path).stream
    assert found.samples[0].segments == (plain, known)
    assert found.preload == (known,)
    check_tokens(found, word_tokenizer, path)
    wrong = replace(plain, before=SampleSegment("text", "a b ", ids[::-1]))
    with pytest.raises(ConfigError, match="not those of `model`'s tokenizer"):
        check_tokens(Stream((replace(sample, segments=(wrong,)),), (0,)), word_tokenizer, path)


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    write_requests(path, HEADER, draw(Traffic(requests=2), CORPUS))
    path.write_text(path.read_text().replace('"max_tokens": 4', '"max_tokens": 5', 1))
    with pytest.raises(ConfigError, match="was changed after it was written"):
        read_requests(path)


@pytest.mark.parametrize("first", [{**HEAD, "version": 2}, {**HEAD, "format": "other"}, [1]])
def test_another_version_is_refused(tmp_path: Path, first: Any) -> None:
    with pytest.raises(ConfigError, match="no request file of version 1"):
        read_requests(by_hand(tmp_path / "r.jsonl", first, CHUNK, REQUEST))


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([REQUEST], "r.jsonl:2: no chunk is called 'c0' so far"),
        ([CHUNK, {**REQUEST, "max_tokens": 0}], "r.jsonl:3: field .*max_tokens"),
        ([CHUNK, {**REQUEST, "arrival": -1}], "r.jsonl:3: field .*arrival"),
        ([CHUNK, {**REQUEST, "extra": 1}], "r.jsonl:3: field .*extra"),
        ([CHUNK, {"tokens": []}], "r.jsonl:3: field"),
        ([CHUNK, 7], "r.jsonl:3: "),
        ([CHUNK], "no requests"),
        (
            [CHUNK, REQUEST, {**REQUEST, "request": "r1", "arrival": 1.0}],
            "some requests have an arrival time",
        ),
        ([CHUNK, REQUEST, REQUEST], "r.jsonl:4: a request before it is called 'r0', too"),
    ],
)
def test_malformed_lines_are_named(tmp_path: Path, lines: list[Any], problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        read_requests(by_hand(tmp_path / "r.jsonl", HEAD, *lines))


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`requests` .*: No such file"):
        read_requests(tmp_path / "none.jsonl")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"`output` .*: cannot be written"):
        write_requests(tmp_path / "file" / "r.jsonl", HEADER, draw(Traffic(requests=1), CORPUS))


def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path) -> None:
    """Such as /dev/null, which root could replace."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"pipe: cannot be written: not a regular file"):
        write_requests(tmp_path / "pipe", HEADER, draw(Traffic(requests=1), CORPUS))
    assert (tmp_path / "pipe").is_fifo()


def test_another_models_tokenizer_is_noticed(word_tokenizer: Any, make_tokenizer: Any) -> None:
    def stream(*segments: SampleSegment) -> Stream:
        sample = draw(Traffic(requests=1), CORPUS).samples[0]
        return Stream((replace(sample, segments=segments),), (0,))

    ids = tuple(word_tokenizer(["a b c"], add_special_tokens=False)["input_ids"][0])
    path = Path("r.jsonl")
    check_tokens(stream(SampleSegment("text", "a b c", ids)), word_tokenizer, path)
    check_tokens(stream(SampleSegment("text", "a b c", (0, *ids))), word_tokenizer, path)
    check_tokens(stream(SampleSegment("chunk", "", (7, 8, 9))), word_tokenizer, path)
    with pytest.raises(ConfigError, match="not those of `model`'s tokenizer"):
        check_tokens(stream(SampleSegment("chunk", "a b c", ids[::-1])), make_tokenizer(), path)
