"""The GitHub action: its steps' scripts, run by bash as a runner would."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness_fakes import Harness, PicEngine, make_sample, run_fakes

from picbench.cli import main
from picbench.compare.baseline import make_baseline, write_baseline
from picbench.store.reader import read_run

ROOT = Path(__file__).parents[2]
ACTION: Mapping[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
STEPS = {step["id"]: step for step in ACTION["runs"]["steps"] if "id" in step}


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """What the action's environment has: a program `picbench`."""
    program = tmp_path / "venv" / "bin" / "picbench"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m picbench "$@"\n')
    program.chmod(0o755)
    return tmp_path / "venv"


def execute(step: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a step with its variables, and the files that GitHub gives to a step."""
    assert set(variables) == set(STEPS[step]["env"])
    files = {name: str(folder / name) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", STEPS[step]["run"]]
    return subprocess.run(
        command, env={**os.environ, **files, **variables}, capture_output=True, text=True
    )


def test_the_gate_step_reports_and_passes_on_the_exit_code(venv: Path, tmp_path: Path) -> None:
    harness = Harness([make_sample(number) for number in range(3)], engines={"mepic": PicEngine()})
    found = read_run(run_fakes(harness, tmp_path / "run", "full", "mepic"))
    baseline = tmp_path / "baseline.json"
    write_baseline(baseline, make_baseline([found], None))
    given = {"DIRECTORY": str(found.path), "VENV": str(venv), "STRICT": ""}
    result = execute("gate", tmp_path, BASELINE=str(baseline), **given)
    assert result.returncode == 0, result.stderr
    assert (found.path / "report.html").stat().st_size > 10_000
    assert "mepic" in (found.path / "comment.md").read_text()
    assert "| ok |" in (tmp_path / "GITHUB_STEP_SUMMARY").read_text()
    wrong = execute("gate", tmp_path, BASELINE=str(tmp_path / "none.json"), **given)
    assert wrong.returncode == 2
    assert "none.json" in wrong.stderr


def test_the_run_step_splits_options_as_a_shell_does(venv: Path, tmp_path: Path) -> None:
    (venv / "bin" / "picbench").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    options = "--algo full,mepic --data 'a b.jsonl'"
    given = {"DIRECTORY": str(tmp_path / "new"), "VENV": str(venv)}
    result = execute("run", tmp_path, OPTIONS=options, **given)
    words = [
        "run",
        "--algo",
        "full,mepic",
        "--data",
        "a b.jsonl",
        "--output",
        str(tmp_path / "new"),
    ]
    assert result.stdout.splitlines() == words
    assert (tmp_path / "GITHUB_OUTPUT").read_text() == f"directory={tmp_path / 'new'}\n"


def test_inputs_and_outputs_are_those_that_steps_use() -> None:
    text = (ROOT / "action.yml").read_text()
    assert {name for name in ACTION["inputs"] if f"inputs.{name}" in text} == set(ACTION["inputs"])
    used = {word for step in STEPS.values() for word in step.get("run", "").split()}
    assert {"run", "report", "table", "gate"} & used <= set(main.commands)
