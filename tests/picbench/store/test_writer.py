"""The run directory survives what can happen to it."""

import json
import os
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from full_disk import largest_file
from harness_fakes import make_sample, make_snapshot
from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.chunk_cache.transfers import StepTimes
from picbench.engines.ledger import KINDS
from picbench.errors import ConfigError
from picbench.store.reader import read_series
from picbench.store.records import ArmBatch, Failure, Grader, GroupResult, SampleRow, to_rows
from picbench.store.writer import (
    BATCHES,
    LEDGER,
    MANIFEST,
    MEMORY,
    SAMPLES,
    SUMMARY,
    WORKLOAD,
    BatchLog,
    RunDirectory,
    TextSegment,
    committed_rows,
    cut,
    read_batches,
    read_workload,
    write_rows,
    write_workload,
)
from picbench.workloads.facts import chunk_id, chunk_sets
from picbench.workloads.sample import Sample, SampleSegment


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run")


def test_rows_are_appended_as_lines_of_json(directory: RunDirectory) -> None:
    row = SampleRow(arm="mepic", sample="a", round=0, timed=True, prompt_sha256="0", text="a\nb")
    directory.append([row])
    directory.append([replace(row, sample="b")])
    rows = [json.loads(line) for line in (directory.path / SAMPLES).read_text().splitlines()]
    assert [(r["sample"], r["text"]) for r in rows] == [("a", "a\nb"), ("b", "a\nb")]
    assert rows[0]["tokens"] == {
        "prompt": 0,
        "reused": 0,
        "compiled": 0,
        "linked": 0,
        "padded": 0,
    }


def test_memory_has_a_column_for_every_kind(directory: RunDirectory) -> None:
    directory.write_memory({"full": [make_snapshot(0, 0.0, 3)], "mepic": []})
    table = pq.read_table(directory.path / "memory.parquet")
    assert table.column_names == ["arm", "step", "time", "pool", *KINDS]
    (only,) = table.to_pylist()
    assert sum(only[kind] for kind in KINDS) == only["pool"] == 100


def test_memory_is_replaced_whole_or_not_at_all(directory: RunDirectory) -> None:
    directory.write_memory({"full": [make_snapshot(0, 0.0, 3)]})
    torn = replace(make_snapshot(1, 0.5, 4), blocks={})
    with pytest.raises(KeyError):
        directory.write_memory({"full": [make_snapshot(0, 0.0, 5)], "mepic": [torn]})
    (only,) = pq.read_table(directory.path / "memory.parquet").to_pylist()
    assert (only["arm"], only["prompt"]) == ("full", 3)


@pytest.mark.parametrize("name", [MANIFEST, MEMORY, SUMMARY, WORKLOAD])
def test_a_file_that_does_not_fit_is_named_and_leaves_nothing(
    directory: RunDirectory, name: str
) -> None:
    samples = [make_sample(n) for n in range(9)]
    write = {
        MANIFEST: lambda: directory.write_manifest({"a": "b" * 1000}),
        MEMORY: lambda: directory.write_memory({"full": [make_snapshot(0, 0.0, 3)]}),
        SUMMARY: lambda: directory.write_summary({"a": "b" * 1000}),
        WORKLOAD: lambda: directory.write_workload(samples, chunk_sets(samples)),
    }[name]
    with largest_file(500), pytest.raises(OSError, match="too large") as caught:
        write()
    assert caught.value.filename == str(directory.path / name)
    assert [path.name for path in directory.path.iterdir()] == ["logs"]


def test_rows_that_do_not_fit_name_their_file(directory: RunDirectory) -> None:
    row = SampleRow(arm="mepic", sample="a", round=0, timed=True, prompt_sha256="0", text="a")
    with largest_file(100), pytest.raises(OSError, match="too large") as caught:
        directory.append([row])
    assert caught.value.filename == str(directory.path / SAMPLES)


@pytest.mark.parametrize("draft", [".workload.jsonl.4711.tmp", ".manifest.json.tmp"])
def test_drafts_of_a_killed_run_are_in_no_way(tmp_path: Path, draft: str) -> None:
    (tmp_path / draft).write_text("half")
    RunDirectory.create(tmp_path)
    (tmp_path / ".other.tmp").write_text("of the user")
    with pytest.raises(ConfigError, match="exists and is not empty"):
        RunDirectory.create(tmp_path)


def test_a_long_ledger_is_not_held_twice(directory: RunDirectory) -> None:
    """A step takes some 700 bytes; to write it, a number for each of its columns is enough."""
    steps = 5000
    ledgers = {arm: [make_snapshot(n, 0.1 * n, 3) for n in range(steps)] for arm in "ab"}
    tracemalloc.start()
    try:
        directory.write_memory(ledgers)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak / (2 * steps) < 200
    assert pq.read_metadata(directory.path / "memory.parquet").num_rows == 2 * steps


def test_discarding_removes_the_folders_that_were_made(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    directory = RunDirectory.create(tmp_path / "here" / "a" / "b")
    directory.log("epic:k=16").write_text("x")
    directory.discard()
    assert [path.name for path in tmp_path.rglob("*")] == ["here"]


def test_discarding_spares_what_others_put_beside(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "runs" / "one")
    (tmp_path / "runs" / "two").mkdir()
    directory.discard()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["two"]


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match="exists and is not empty"):
        RunDirectory.create(tmp_path / "run")


def test_logs_have_names_that_every_file_system_takes(directory: RunDirectory) -> None:
    assert directory.log("epic:k=16/x").name == "epic_k=16_x.log"


def test_a_ledger_is_kept_in_a_folder_of_any_name(tmp_path: Path) -> None:
    """Arrow opens names of files as UTF-8, which not every name and not every locale's is."""
    directory = RunDirectory.create(tmp_path / os.fsdecode(b"run \xff"))
    directory.write_memory({"mepic": [make_snapshot(0, 20, 5.0)]})
    assert list(read_series(directory.path / MEMORY)) == ["mepic"]


SAMPLES_OF_RUN = [make_sample(n) for n in range(6)]
SETS = chunk_sets(SAMPLES_OF_RUN)


def batch(number: int, size: int = 2) -> ArmBatch:
    group = SAMPLES_OF_RUN[: size + 1][:size]
    result = GroupResult(
        outcomes=(Failure("no \ud800 text\u2028"),) * size,
        busy=0.1 + number,
        snapshots=tuple(make_snapshot(step, step / 3, 1 / 16 * step) for step in range(number)),
        clean=False,
        moved={"host": (number, 7)},
        step_times=StepTimes(1 / 3, 1e-9),
        compiled=("a.b", "a.b"),
    )
    return ArmBatch(number, "mepic", group, result, lost="gone" if number == 2 else None)


def rows_of(one: ArmBatch) -> list[SampleRow]:
    return to_rows(one, Grader(lambda reply, answers: 0.1), SETS)


def write(folder: Path, *sizes: int) -> list[ArmBatch]:
    batches = [batch(number, size) for number, size in enumerate(sizes)]
    log = BatchLog(folder)
    for one in batches:
        log.append(one, rows_of(one))
    return batches


def test_batches_come_back_as_they_were(tmp_path: Path) -> None:
    written = write(tmp_path, 2, 1, 3)
    for one, stored in zip(written, read_batches(tmp_path), strict=True):
        assert stored.rows == rows_of(one)
        assert stored.result == replace(one.result, outcomes=())
        assert (stored.line.round, stored.line.arm) == (one.round, one.arm)
        assert stored.line.lost == one.lost
    assert committed_rows(tmp_path) == 6


def test_nothing_is_read_where_nothing_was_written(tmp_path: Path) -> None:
    assert read_batches(tmp_path) == []
    assert committed_rows(tmp_path) is None
    cut(tmp_path, [])
    assert list(tmp_path.iterdir()) == []


@given(st.sampled_from([SAMPLES, LEDGER, BATCHES]), st.floats(0, 1))
def test_whatever_a_file_lost_the_batches_before_it_are_whole(
    tmp_path_factory: pytest.TempPathFactory, name: str, share: float
) -> None:
    """As after a machine stopped, with some files flushed and others not."""
    folder = tmp_path_factory.mktemp("run")
    written = write(folder, 1, 2, 1)
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: int(share * len(content))])
    stored = read_batches(folder)
    for one, found in zip(written, stored, strict=False):
        assert found.rows == rows_of(one)
    cut(folder, stored)
    assert [b.line for b in read_batches(folder)] == [b.line for b in stored]
    sizes = {path.name: path.read_bytes().count(b"\n") for path in folder.iterdir()}
    assert sizes[SAMPLES] == sum(found.line.rows for found in stored)
    assert sizes[LEDGER] == sizes[BATCHES] == len(stored)


def test_a_line_that_is_no_batch_ends_the_log(tmp_path: Path) -> None:
    write(tmp_path, 1, 1, 1)
    lines = (tmp_path / BATCHES).read_bytes().splitlines(keepends=True)
    (tmp_path / BATCHES).write_bytes(b"".join([lines[0], b"\0\0\0\n", lines[2]]))
    assert len(read_batches(tmp_path)) == 1


def test_files_are_flushed_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    times: Iterator[float] = iter([0.0, 0.4, 0.9, 1.1, 1.5, 2.2])
    log = BatchLog(tmp_path, clock=lambda: next(times))
    counts = []
    for number in range(5):
        log.append(batch(number), rows_of(batch(number)))
        counts.append(len(flushed))
    assert counts == [0, 0, 3, 3, 6]


def test_rows_are_replaced_whole(tmp_path: Path) -> None:
    write(tmp_path, 2)
    rows = rows_of(batch(0, 2))
    write_rows(tmp_path / SAMPLES, rows[:1])
    write_rows(tmp_path / SAMPLES, rows[1:])
    assert (tmp_path / SAMPLES).read_bytes().count(b"\n") == 1
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


TEXTS = st.text(st.characters(codec=None), max_size=5)
TOKENS = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)
# A chunk is known by its tokens, so that these decide its text.
SEGMENTS = st.one_of(
    st.builds(SampleSegment, st.just("text"), TEXTS, TOKENS),
    TOKENS.map(lambda tokens: SampleSegment("chunk", "c" * (sum(tokens) % 3), tokens)),
)


def sent(path: Path, samples: list[Sample]) -> list[str]:
    write_workload(path, samples, chunk_sets(samples))
    return path.read_text("utf-8").splitlines()


@given(st.lists(st.lists(SEGMENTS, max_size=4), min_size=1, max_size=4))
def test_samples_come_back(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[list[SampleSegment]]
) -> None:
    samples = [
        Sample(f"s{n}", "musique", tuple(own), ("yes", "\ud800"), 9)
        for n, own in enumerate(prompts)
    ]
    path = tmp_path_factory.mktemp("run") / "workload.jsonl"
    write_workload(path, samples, chunk_sets(samples))
    found = read_workload(path)
    assert list(found) == [sample.id for sample in samples]
    for sample in samples:
        stored = found[sample.id]
        assert (stored.answers, stored.max_tokens) == (list(sample.answers), 9)
        for segment, kept in zip(sample.segments, stored.segments, strict=True):
            assert kept.tokens == len(segment.tokens)
            assert kept.text == (segment.text or None)
            assert kept.ids == (None if segment.text else list(segment.tokens))
            assert kept.chunk == (chunk_id(segment) if segment.kind == "chunk" else None)


def test_a_chunk_is_written_once_before_its_first_sample(tmp_path: Path) -> None:
    chunk, question = SampleSegment("chunk", "c", (1,)), SampleSegment("text", "q", (2, 3))
    lines = sent(tmp_path / "w", [Sample(n, "d", (chunk, chunk, question), (), 1) for n in "ab"])
    assert [next(iter(json.loads(line))) for line in lines] == ["chunk", "sample", "sample"]
    found = read_workload(tmp_path / "w")["b"].segments
    assert found[2] == TextSegment(tokens=2, text="q")
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}\n",
        '{"chunk": "a"}\n',
        '{"sample": "a"}\n',
        '{"sample": "a", "segments": [{"chunk": "b"}]}\n',
    ],
)
def test_other_contents_are_value_errors(tmp_path: Path, text: str) -> None:
    (tmp_path / "w").write_text(text)
    with pytest.raises(ValueError):
        read_workload(tmp_path / "w")
