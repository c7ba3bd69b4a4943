"""`picbench rescore` says what changed."""

from dataclasses import replace
from pathlib import Path

import click
from click.testing import CliRunner
from harness_fakes import Harness, make_sample, run_fakes

from picbench.cli import main
from picbench.cli.results import rescore
from picbench.workloads.scoring import METRICS


def test_what_changed_is_said(tmp_path: Path) -> None:
    samples = [replace(make_sample(n), dataset="musique", answers=("yes sir",)) for n in range(3)]
    folder = run_fakes(Harness(samples), tmp_path / "run", "full", "mepic")
    result = CliRunner().invoke(main, ["rescore", str(folder), "--metric", "f1"])
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines() == [
        "full: f1 0.000, now f1 0.667; 3 scores and 0 outcomes changed",
        "mepic: f1 0.000, now f1 0.667; 3 scores and 0 outcomes changed",
        "kept: samples.1.jsonl, summary.1.json",
    ]
    assert "| 0.667 |" in (folder / "table.md").read_text()


def test_what_is_no_run_is_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["rescore", str(tmp_path)])
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1


def test_the_metrics_are_those_that_there_are() -> None:
    (option,) = (p for p in rescore.params if p.name == "metric")
    assert isinstance(option.type, click.Choice)
    assert tuple(option.type.choices) == METRICS
