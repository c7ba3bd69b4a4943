"""The last line on stdout."""

import json
from pathlib import Path

from harness_fakes import Harness, make_sample, run_fakes

from picbench.run.result import status_line
from picbench.store.writer import SUMMARY


def test_scores_of_real_weights_are_told(tmp_path: Path) -> None:
    harness = Harness([make_sample(n) for n in range(2)], weights="real")
    line = status_line(run_fakes(harness, tmp_path / "run", "full", "mepic"), 0)
    assert "\n" not in line
    assert json.loads(line)["arms"]["mepic"]["score"] == 1.0


def test_a_run_without_results_has_no_arms(tmp_path: Path) -> None:
    folder = run_fakes(Harness([make_sample(0)]), tmp_path / "run", "mepic")
    (folder / SUMMARY).unlink()
    assert json.loads(status_line(folder, 130))["arms"] == {}
