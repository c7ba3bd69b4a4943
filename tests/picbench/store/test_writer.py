"""The run directory survives what can happen to it; what is in it keeps to published schemas."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from full_disk import largest_file
from harness_fakes import REFUSED, Harness, make_sample, make_snapshot, run_fakes
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from picbench.engines.chunk_cache.transfers import StepTimes
from picbench.engines.ledger import KINDS
from picbench.errors import ConfigError
from picbench.store import writer
from picbench.store.reader import read_workload
from picbench.store.records import ArmBatch, Failure, Grader, GroupResult, SampleRow, to_rows
from picbench.store.writer import (
    BATCHES,
    LEDGER,
    MANIFEST,
    MEMORY,
    SAMPLES,
    SCHEMA,
    SUMMARY,
    WORKLOAD,
    RunDirectory,
    TextSegment,
    cut,
    json_schemas,
    log_name,
    read_batches,
    schema_name,
)
from picbench.workloads.facts import chunk_id, chunk_sets
from picbench.workloads.sample import Sample, SampleSegment

PUBLISHED = Path(__file__).parents[3] / "docs" / "schema"
GOLDEN = Path(__file__).parent / "golden" / str(SCHEMA)
FILES = tuple(json_schemas())


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run")


def test_memory_is_replaced_whole_or_not_at_all(directory: RunDirectory) -> None:
    directory.write_memory({"full": [make_snapshot(0, 0.0, 3)], "mepic": []})
    torn = replace(make_snapshot(1, 0.5, 4), blocks={})
    with pytest.raises(KeyError):
        directory.write_memory({"full": [make_snapshot(0, 0.0, 5)], "mepic": [torn]})
    table = pq.read_table(directory.path / MEMORY)
    assert table.column_names == ["arm", "step", "time", "pool", *KINDS]
    (only,) = table.to_pylist()
    assert (only["arm"], only["prompt"]) == ("full", 3)
    assert sum(only[kind] for kind in KINDS) == only["pool"] == 100


@pytest.mark.parametrize("name", [MANIFEST, MEMORY, SUMMARY, WORKLOAD, SAMPLES])
def test_a_file_that_does_not_fit_is_named_and_leaves_nothing(
    directory: RunDirectory, name: str
) -> None:
    samples = [make_sample(n) for n in range(9)]
    row = SampleRow(arm="a", sample="b", round=0, timed=True, prompt_sha256="0", text="c" * 1000)
    write = {
        MANIFEST: lambda: directory.write(MANIFEST, {"a": "b" * 1000}),
        MEMORY: lambda: directory.write_memory({"full": [make_snapshot(0, 0.0, 3)]}),
        SUMMARY: lambda: directory.write(SUMMARY, {"a": "b" * 1000}),
        WORKLOAD: lambda: directory.write_workload(samples, chunk_sets(samples)),
        SAMPLES: lambda: directory.append([row]),
    }[name]
    with largest_file(500), pytest.raises(OSError, match="too large") as caught:
        write()
    assert caught.value.filename == str(directory.path / name)
    kept = {"logs"} if name != SAMPLES else {"logs", SAMPLES}
    assert {path.name for path in directory.path.iterdir()} == kept


@pytest.mark.parametrize("draft", [".workload.jsonl.4711.tmp", ".manifest.json.tmp"])
def test_drafts_of_a_killed_run_are_in_no_way(tmp_path: Path, draft: str) -> None:
    (tmp_path / draft).write_text("half")
    RunDirectory.create(tmp_path)
    (tmp_path / ".other.tmp").write_text("of the user")
    for taken in (tmp_path, tmp_path / ".other.tmp"):
        with pytest.raises(ConfigError, match="exists and is not empty"):
            RunDirectory.create(taken)


def test_discarding_removes_the_folders_that_were_made(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    directory = RunDirectory.create(tmp_path / "here" / "a" / "b")
    assert log_name("epic:k=16/x") == "epic_k=16_x.log"
    (directory.path / "logs" / "x.log").write_text("x")
    (tmp_path / "here" / "other").mkdir()
    directory.discard()
    assert [path.name for path in tmp_path.rglob("*")] == ["here", "other"]


def test_a_ledger_is_kept_in_a_folder_of_any_name(tmp_path: Path) -> None:
    """Arrow opens names of files as UTF-8, which not every name and not every locale's is."""
    directory = RunDirectory.create(tmp_path / os.fsdecode(b"run \xff"))
    directory.write_memory({"mepic": [make_snapshot(0, 20, 5.0)]})
    assert MEMORY in {path.name for path in directory.path.iterdir()}


SAMPLES_OF_RUN = [make_sample(n) for n in range(6)]


def batch(number: int, size: int = 2) -> ArmBatch:
    result = GroupResult(
        outcomes=(Failure("no \ud800 text\u2028"),) * size,
        busy=0.1 + number,
        snapshots=tuple(make_snapshot(step, step / 3, 1 / 16 * step) for step in range(number)),
        clean=False,
        moved={"host": (number, 7)},
        step_times=StepTimes(1 / 3, 1e-9),
        compiled=("a.b", "a.b"),
    )
    lost = "gone" if number == 2 else None
    return ArmBatch(number, "mepic", SAMPLES_OF_RUN[:size], result, lost=lost)


def rows_of(one: ArmBatch) -> list[SampleRow]:
    return to_rows(one, Grader(lambda reply, answers: 0.1), chunk_sets(SAMPLES_OF_RUN))


def write(folder: Path, *sizes: int) -> list[ArmBatch]:
    batches = [batch(number, size) for number, size in enumerate(sizes)]
    directory = RunDirectory(folder)
    for one in batches:
        directory.keep(one, rows_of(one))
    return batches


def test_batches_come_back_as_they_were(tmp_path: Path) -> None:
    written = write(tmp_path, 2, 1, 3)
    for one, stored in zip(written, read_batches(tmp_path), strict=True):
        assert stored.rows == rows_of(one)
        assert stored.result == replace(one.result, outcomes=())
        assert (stored.line.round, stored.line.arm) == (one.round, one.arm)
        assert stored.line.lost == one.lost


@given(st.sampled_from([SAMPLES, LEDGER, BATCHES]), st.floats(0, 1))
def test_whatever_a_file_lost_the_batches_before_it_are_whole(
    tmp_path_factory: pytest.TempPathFactory, name: str, share: float
) -> None:
    """As after a machine stopped, with some files flushed and others not."""
    folder = tmp_path_factory.mktemp("run")
    assert read_batches(folder) == []
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
    monkeypatch.setattr(writer, "monotonic", lambda: next(times))
    directory = RunDirectory(tmp_path)
    counts = []
    for number in range(5):
        directory.keep(batch(number), rows_of(batch(number)))
        counts.append(len(flushed))
    assert counts == [0, 0, 3, 3, 6]


TEXTS = st.text(st.characters(codec=None), max_size=5)
TOKENS = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)
# A chunk is known by its tokens, so that these decide its text.
SEGMENTS = st.one_of(
    st.builds(SampleSegment, st.just("text"), TEXTS, TOKENS),
    TOKENS.map(lambda tokens: SampleSegment("chunk", "c" * (sum(tokens) % 3), tokens)),
)


@given(st.lists(st.lists(SEGMENTS, max_size=4), min_size=1, max_size=4))
def test_samples_come_back(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[list[SampleSegment]]
) -> None:
    samples = [
        Sample(f"s{n}", "musique", tuple(own), ("yes", "\ud800"), 9)
        for n, own in enumerate(prompts)
    ]
    directory = RunDirectory(tmp_path_factory.mktemp("run"))
    directory.write_workload(samples, chunk_sets(samples))
    found = read_workload(directory.path / WORKLOAD)
    assert list(found) == [sample.id for sample in samples]
    for sample in samples:
        stored = found[sample.id]
        assert (stored.answers, stored.max_tokens) == (list(sample.answers), 9)
        for segment, kept in zip(sample.segments, stored.segments, strict=True):
            assert kept.tokens == len(segment.tokens)
            assert kept.text == (segment.text or None)
            assert kept.ids == (None if segment.text else list(segment.tokens))
            assert kept.chunk == (chunk_id(segment) if segment.kind == "chunk" else None)


def test_a_chunk_is_written_once_before_its_first_sample(directory: RunDirectory) -> None:
    chunk, question = SampleSegment("chunk", "c", (1,)), SampleSegment("text", "q", (2, 3))
    samples = [Sample(name, "d", (chunk, chunk, question), (), 1) for name in "ab"]
    directory.write_workload(samples, chunk_sets(samples))
    path = directory.path / WORKLOAD
    lines = path.read_text("utf-8").splitlines()
    assert [next(iter(json.loads(line))) for line in lines] == ["chunk", "sample", "sample"]
    found = read_workload(path)["b"].segments
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


def contents(path: Path) -> list[Any]:
    """The file, or its lines."""
    text = path.read_text("utf-8")
    return [*map(json.loads, text.splitlines() if path.suffix == ".jsonl" else [text])]


def complaints(folder: Path, file: str) -> list[str]:
    validator = Draft202012Validator(json_schemas()[file])
    found = (error for value in contents(folder / file) for error in validator.iter_errors(value))
    return [f"{error.json_path}: {error.message}" for error in found]


@pytest.mark.parametrize("file", FILES)
def test_published_schemas_are_current(file: str) -> None:
    published = json.loads((PUBLISHED / schema_name(file)).read_text("utf-8"))
    assert published == json_schemas()[file], "run make schemas"
    if file != LEDGER:
        assert complaints(GOLDEN, file) == []


@pytest.mark.parametrize("arrivals", [None, (0.0, 0.5, 1.0)])
def test_what_a_run_writes_keeps_to_the_schemas(
    tmp_path: Path, arrivals: tuple[float, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunDirectory, "compact", lambda _: None)
    samples = [make_sample(n, first=REFUSED if n == 1 else 1) for n in range(3)]
    folder = run_fakes(Harness(samples, arrivals=arrivals), tmp_path / "run", "full", "mepic")
    assert {file: complaints(folder, file) for file in FILES} == {file: [] for file in FILES}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [({"colour": 1}, "colour"), ({"outcome": "lost"}, "lost"), ({"tokens": {}}, "prompt")],
)
def test_other_rows_do_not(change: dict[str, Any], complaint: str) -> None:
    row = contents(GOLDEN / "samples.jsonl")[0]
    validator = Draft202012Validator(json_schemas()["samples.jsonl"])
    assert any(complaint in error.message for error in validator.iter_errors(row | change))
