"""Batches come back as they were measured, or not at all."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from harness_fakes import make_sample, make_snapshot
from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.chunk_cache.transfers import StepTimes
from picbench.store.records import ArmBatch, Failure, Grader, GroupResult, SampleRow, to_rows
from picbench.store.writer import (
    BATCHES,
    LEDGER,
    SAMPLES,
    BatchLog,
    committed_rows,
    cut,
    read_batches,
    write_rows,
)
from picbench.workloads.facts import chunk_sets

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
