"""Arms in columns, from a run over fake engines."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from harness_fakes import REFUSED, Harness, make_sample

from picbench.cli import main
from picbench.compare.arm import COUNTERS, TIMES, MeasuredArm, measured_arms
from picbench.store.reader import read_run
from picbench.store.writer import SAMPLES


def arms_of(harness: Harness, output: Path, *more: str) -> dict[str, MeasuredArm]:
    flags = ("--dataset", "fake", "--data", "d", "--output", str(output), "--algo", "full,mepic")
    CliRunner().invoke(main, ("run", *flags, *more), obj=harness.services())
    return measured_arms(read_run(output))


def test_columns_have_a_value_for_each_answer(tmp_path: Path) -> None:
    arms = arms_of(Harness([make_sample(n) for n in range(3)]), tmp_path / "run")
    assert list(arms) == ["full", "mepic"]
    arm = arms["mepic"]
    assert arm.samples == ("s0", "s1", "s2")
    assert arm.times["ttft_ms"] == pytest.approx((100,) * 3)
    assert arm.counters["computed_tokens"] == (36 - 16 + 4,) * 3
    assert arm.counters["chunk_blocks"] == (1,) * 3
    assert arm.scores == (1.0,) * 3
    assert arm.totals["peak_blocks"] == 20
    assert arm.totals["failed"] == 0
    assert len(set(arm.prompts)) == 3
    assert len(set(arm.outputs)) == 1
    columns = [*(arm.times[name] for name in TIMES), *(arm.counters[name] for name in COUNTERS)]
    assert {len(column) for column in columns} == {3}


def test_failed_requests_are_counted_and_have_no_values(tmp_path: Path) -> None:
    samples = [make_sample(0), make_sample(1, first=REFUSED), make_sample(2)]
    arm = arms_of(Harness(samples), tmp_path / "run")["full"]
    assert arm.samples == ("s0", "s2")
    assert arm.totals["failed"] == 1
    assert arm.times["ttft_ms"] == (None, None), "they ran apart from their group"


def test_repeated_samples_keep_apart(tmp_path: Path) -> None:
    arm = arms_of(Harness([make_sample(0), make_sample(0)]), tmp_path / "run")["full"]
    assert arm.samples == ("s0", "s0+1")
    assert arm.clusters[0] == arm.clusters[1]


def test_repeats_are_numbered_by_themselves_and_not_by_what_was_answered(tmp_path: Path) -> None:
    run = tmp_path / "run"
    whole = arms_of(Harness([make_sample(0), make_sample(1)]), run, "--repeats", "2")["full"]
    assert whole.samples == ("s0", "s1", "s0#2", "s1#2")
    assert (whole.rounds, whole.places) == ((0, 0, 0, 0), (0, 1, 0, 1))
    assert whole.repeats == (0, 0, 1, 1)
    rows = [json.loads(line) for line in (run / SAMPLES).read_text().splitlines()]
    failed = next(r for r in rows if (r["arm"], r["sample"], r["repeat"]) == ("full", "s0", 0))
    answered, failed["error"] = dict(failed), "lost"
    write_rows(run, rows)
    arm = measured_arms(read_run(run))["full"]
    assert arm.samples == ("s1", "s0#2", "s1#2")
    assert (arm.rounds, arm.places, arm.repeats) == ((0, 0, 0), (1, 0, 1), (0, 1, 1))
    assert arm.totals["failed"] == 1
    write_rows(run, [*rows, answered])
    arm = measured_arms(read_run(run))["full"]
    assert sorted(arm.samples) == sorted(whole.samples)
    assert arm.totals["failed"] == 0


def write_rows(run: Path, rows: list[dict[str, Any]]) -> None:
    (run / SAMPLES).write_text("".join(json.dumps(row) + "\n" for row in rows))
