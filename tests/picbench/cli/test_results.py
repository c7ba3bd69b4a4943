"""Commands that read run directories."""

import json
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from harness_fakes import Harness, make_sample, run_fakes

from picbench.cli import main
from picbench.cli.results import rescore
from picbench.store.writer import BATCHES, MANIFEST, SUMMARY
from picbench.workloads.scoring import METRICS

GOLDEN = Path(__file__).parents[1] / "store" / "golden"


def show(folder: Path, *flags: str) -> Result:
    return CliRunner().invoke(main, ["show", str(folder), *flags])


def lines(folder: Path) -> dict[str, str]:
    """What is shown, by its name at the start of a line."""
    result = show(folder)
    assert result.exit_code == 0, result.stderr
    found = (line.strip().split("  ", 1) for line in result.stdout.splitlines())
    return {pair[0]: pair[1].strip() for pair in found if len(pair) == 2}


def test_a_finished_run(tmp_path: Path) -> None:
    harness = Harness([make_sample(n) for n in range(4)])
    folder = run_fakes(harness, tmp_path / "run", "full", "mepic", seed=7)
    found = lines(folder)
    assert found["status"] == "complete"
    assert found["seed"] == "7"
    assert found["algo"] == "full,mepic"
    assert "concurrency" not in found
    assert found["requests"] == "4 to each of 2 arms"
    assert found["outcomes of mepic"] == "4 answered, 0 abstained, 0 unparsed, 0 error"
    assert "picbench 0.1.0" in found["packages"]
    text = show(folder).stdout
    assert "TTFT p50" in text
    assert "mepic against full: first token in 0.25x the time" in text


def test_a_run_that_was_killed(tmp_path: Path) -> None:
    folder = run_fakes(Harness([make_sample(n) for n in range(4)]), tmp_path / "run", "mepic")
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["attempts"][0] |= {"status": "running", "ended": None}
    (folder / MANIFEST).write_text(json.dumps(manifest | {"status": "running"}))
    for name in (SUMMARY, BATCHES):
        (folder / name).unlink()
    found = lines(folder)
    assert found["status"] == "running"
    assert "no end (killed, or running): running" in found["attempt"]
    assert "TTFT" not in show(folder).stdout


def test_the_schema_is_told() -> None:
    assert lines(GOLDEN / "3")["schema"] == "3"


def test_json_is_the_manifest_and_the_summary() -> None:
    found = json.loads(show(GOLDEN / "3", "--format", "json").stdout)
    assert found["manifest"]["schema"] == 3
    assert found["arms"]["mepic"]["requests"] == 3


def test_what_is_no_run_is_one_line(tmp_path: Path) -> None:
    result = show(tmp_path)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1


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


def test_what_is_no_run_is_one_line_rescore(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["rescore", str(tmp_path)])
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1


def test_the_metrics_are_those_that_there_are() -> None:
    (option,) = (p for p in rescore.params if p.name == "metric")
    assert isinstance(option.type, click.Choice)
    assert tuple(option.type.choices) == tuple(METRICS)


def report(*arguments: str) -> Result:
    return CliRunner().invoke(main, ("report", *arguments))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    made = Harness([make_sample(n) for n in range(4)], weights="real")
    return run_fakes(made, tmp_path / "run", "full", "mepic")


def test_one_run_has_its_page_beside_its_files(run: Path) -> None:
    done = report(str(run))
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith(f"{run / 'report.html'} (")
    assert "mepic against full" in (run / "report.html").read_text()
    assert report(str(run)).exit_code == 0


def test_several_runs_have_one_page_here(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = report(str(run), str(run))
    assert done.exit_code == 0, done.stderr
    assert "Overview" in (tmp_path / "report.html").read_text()


def test_output_and_margin_are_taken(run: Path, tmp_path: Path) -> None:
    done = report(str(run), "--output", str(tmp_path / "page.html"), "--margin", "0.6")
    assert done.exit_code == 0, done.stderr
    assert "On other documents: loses less than 0.6" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "RUN..."),
        (("nothing",), "not a run directory"),
        (("RUN", "--output", "no/such/folder.html"), "--output no/such/folder.html"),
        (("RUN", "--margin", "2"), "--margin"),
    ],
)
def test_wrong_usage_is_exit_2(run: Path, arguments: tuple[str, ...], message: str) -> None:
    done = report(*(str(run) if argument == "RUN" else argument for argument in arguments))
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stdout == ""
