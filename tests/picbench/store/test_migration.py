"""Runs of today's schema and of the one before are read; others are refused with advice."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from picbench.errors import ConfigError, InvalidRun
from picbench.store.manifest import SCHEMA
from picbench.store.reader import read_run
from picbench.store.writer import MANIFEST, SUMMARY

GOLDEN = Path(__file__).parent / "golden"

#: What the golden runs measured, whatever the schema: (arm, sample, error, tokens reused, score).
ROWS = [
    ("full", "s0", None, 0, 1.0),
    ("mepic", "s0", None, 16, 1.0),
    ("mepic", "s1", "a chunk is too long (`context`)", 0, None),
    ("full", "s1", "a chunk is too long (`context`)", 0, None),
    ("full", "s2", None, 0, 1.0),
    ("mepic", "s2", None, 16, 1.0),
]


def golden(version: int) -> Path:
    return GOLDEN / str(version)


def changed(path: Path, folder: Path, file: str, **values: Any) -> Path:
    """A copy of a run with other values in one of its files."""
    copy = Path(shutil.copytree(path, folder / "run"))
    document = json.loads((copy / file).read_text()) | values
    (copy / file).write_text(json.dumps(document))
    return copy


def test_there_is_a_golden_run_of_each_schema_that_is_read() -> None:
    assert sorted(int(path.name) for path in GOLDEN.iterdir()) == [SCHEMA - 1, SCHEMA]


@pytest.mark.parametrize("version", [SCHEMA - 1, SCHEMA])
def test_golden_rows(version: int) -> None:
    run = read_run(golden(version))
    found = [(r.arm, r.sample, r.error, r.tokens.reused, r.score) for r in run.rows]
    assert found == ROWS
    assert run.schema == version
    assert [row.outcome for row in run.rows if row.error] == ["error"] * 2


@pytest.mark.parametrize("version", [SCHEMA - 1, SCHEMA])
def test_golden_summaries(version: int) -> None:
    summary = read_run(golden(version)).summary
    assert list(summary) == ["full", "mepic"]
    mepic = summary["mepic"]
    assert (mepic.requests, mepic.failed, mepic.score.mean) == (3, 1, 1.0)
    assert mepic.tokens.reused == 32
    assert mepic.blocks.peak_referenced == 20
    assert mepic.ttft_vs_full is not None
    assert mepic.ttft_vs_full.geomean == pytest.approx(0.25)


@pytest.mark.parametrize("version", [SCHEMA - 1, SCHEMA])
def test_golden_manifests(version: int) -> None:
    manifest = read_run(golden(version)).manifest
    assert (manifest["schema"], manifest["status"]) == (SCHEMA, "partial")
    assert [attempt["status"] for attempt in manifest["attempts"]] == ["partial"]
    assert manifest["config"]["slo"] == "ttft=500"
    assert manifest["model"]["restates"] is False


def test_an_older_run_does_not_know_what_was_shared() -> None:
    old, new = read_run(golden(1)), read_run(golden(2))
    assert {row.cluster for row in old.rows} == {None}
    assert [row.cluster for row in new.rows] == ["s0", "s0", "s1", "s1", "s2", "s2"]
    assert old.summary["full"].outcomes == {}
    assert new.summary["full"].outcomes == {
        "answered": 2,
        "abstained": 0,
        "unparsed": 0,
        "error": 1,
    }
    with pytest.raises(ConfigError, match=r"the run has no workload\.jsonl"):
        old.workload  # noqa: B018
    assert [asdict(s)["text"] for s in new.workload["s2"].segments] == ["t", "c", "d", "q"]


@pytest.mark.parametrize("version", [0, SCHEMA + 1])
def test_an_unknown_schema_is_refused_with_advice(tmp_path: Path, version: int) -> None:
    path = changed(golden(SCHEMA), tmp_path, MANIFEST, schema=version)
    with pytest.raises(
        InvalidRun, match=f"schema {version}; this picbench reads 1 and 2"
    ) as caught:
        read_run(path)
    assert "repeat the run" in caught.value.hint
    assert caught.value.exit_code == 3


def test_a_summary_of_an_unknown_schema_is_refused(tmp_path: Path) -> None:
    run = read_run(changed(golden(SCHEMA), tmp_path, SUMMARY, schema=7))
    with pytest.raises(InvalidRun, match="schema 7"):
        run.summary  # noqa: B018
