"""What trackers get of a run, read back from a local MLflow and from W&B's own file."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from harness_fakes import Harness, PicEngine, make_sample, run_fakes

from picbench.cli import main
from picbench.report.export import facts_of, metrics_of
from picbench.store.reader import Run, read_run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run of two arms of fake engines."""
    harness = Harness([make_sample(number) for number in range(3)], engines={"mepic": PicEngine()})
    return read_run(run_fakes(harness, tmp_path / "run", "full", "mepic"))


def export(run: Run, tracker: str) -> str:
    """What the command prints."""
    result = CliRunner().invoke(main, ["export", str(run.path), "--to", tracker])
    assert result.exit_code == 0, result.output
    return result.output


def test_facts_are_what_was_given_and_what_it_ran_on(run: Run) -> None:
    facts = facts_of(run)
    assert facts["config.algo"] == "['full', 'mepic']"
    assert facts["config.seed"] == 0
    assert facts["requests"] == 3
    assert not {None, ""} & set(facts.values())


def test_scores_of_random_weights_are_no_metrics(run: Run) -> None:
    known = metrics_of(run.summary["mepic"])
    assert known["answered"] == 3
    assert "score" not in known


def test_mlflow_has_a_run_and_its_arms_below(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "tracked").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    assert "picbench" in export(run, "mlflow")
    mlflow.set_tracking_uri((tmp_path / "tracked").as_uri())
    found = mlflow.search_runs(experiment_names=["picbench"], output_format="list")
    arms = {made.info.run_name: made for made in found}
    assert set(arms) == {"run", "full", "mepic"}
    for name, summary in run.summary.items():
        assert arms[name].data.metrics == pytest.approx(metrics_of(summary))
        assert arms[name].data.tags["mlflow.parentRunId"] == arms["run"].info.run_id
    assert arms["run"].data.params == {name: str(v) for name, v in facts_of(run).items()}
    uri = arms["run"].info.artifact_uri.removeprefix("file://")
    assert json.loads((Path(uri) / "summary.json").read_text())["arms"].keys() == run.summary.keys()


def test_wandb_has_a_run_for_each_arm(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert "group run of picbench" in export(run, "wandb")
    wandb.teardown()
    written = [file.read_bytes() for file in tmp_path.glob("wandb/offline-run-*/run-*.wandb")]
    assert len(written) == len(run.summary)
    for name, summary in run.summary.items():
        [mine] = [data for data in written if f'"{name}"'.encode() in data]
        for metric, value in metrics_of(summary).items():
            assert metric.encode() in mine and json.dumps(value).encode() in mine


def test_a_tracker_that_is_not_installed_is_named(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    result = CliRunner().invoke(main, ["export", str(run.path), "--to", "mlflow"])
    assert result.exit_code == 2
    assert "pip install 'picbench[mlflow]'" in result.output
