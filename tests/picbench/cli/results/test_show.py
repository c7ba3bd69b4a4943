"""`picbench show` tells what is in a run directory, finished or not."""

import json
from pathlib import Path

from click.testing import CliRunner, Result
from harness_fakes import Harness, make_sample, run_fakes

from picbench.cli import main
from picbench.store.writer import BATCHES, MANIFEST, SUMMARY

GOLDEN = Path(__file__).parents[2] / "store" / "golden"


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
    assert lines(GOLDEN / "2")["schema"] == "2"


def test_json_is_the_manifest_and_the_summary() -> None:
    found = json.loads(show(GOLDEN / "2", "--format", "json").stdout)
    assert found["manifest"]["schema"] == 2
    assert found["arms"]["mepic"]["requests"] == 3


def test_what_is_no_run_is_one_line(tmp_path: Path) -> None:
    result = show(tmp_path)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
