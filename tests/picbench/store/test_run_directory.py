"""The run directory survives what can happen to it."""

import json
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from full_disk import largest_file
from harness_fakes import make_sample, make_snapshot

from picbench.engines.ledger import KINDS
from picbench.errors import ConfigError
from picbench.files import locked, write_json
from picbench.store.reader import read_series
from picbench.store.records import SampleRow
from picbench.store.writer import MANIFEST, MEMORY, SAMPLES, SUMMARY, WORKLOAD, RunDirectory
from picbench.workloads.facts import chunk_sets


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


def test_json_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": 2, "b": object()})
    assert json.loads(path.read_text()) == {"a": 1}


def test_json_has_no_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "x.json", {"a": float("nan")})


def test_a_file_is_held_by_one_at_a_time(tmp_path: Path) -> None:
    path, order = tmp_path / "x.json", list[str]()

    def other() -> None:
        with locked(path):
            order.append("other")

    with locked(path):
        thread = Thread(target=other)
        thread.start()
        order.append("first")
    thread.join()
    assert order == ["first", "other"]
    assert not any(tmp_path.iterdir())


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
