"""`picbench report`: where the page goes, and its exit codes."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from harness_fakes import Harness, make_sample, run_fakes

from picbench.cli import main


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
    assert "It loses less than 0.6" in (tmp_path / "page.html").read_text()


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
