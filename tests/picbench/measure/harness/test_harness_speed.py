"""The harness's own cost is measured over runs that its commands read, and judged by limits."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from picbench.cli import main
from picbench.errors import EngineError
from picbench.measure.harness.command_times import CommandTimes, time_command
from picbench.measure.harness.harness_speed import HarnessSettings, HarnessSpeed, render
from picbench.measure.harness.instant_run import QUESTIONS, RunCost, run_instantly
from picbench.output.run_reader import read_run

FACTS = dict.fromkeys(
    ("cpu", "cores", "python", "numpy", "scipy", "pydantic", "pyarrow", "jinja2", "matplotlib"), "x"
)
FAST = HarnessSpeed(
    HarnessSettings(10, 20, 1),
    (CommandTimes("--help", (0.2,), (0.4,)), CommandTimes("report", (3.0,), (9.0,))),
    report_bytes=1_000_000,
    runs=(RunCost(20, prepare_s=0.004, serve_s=0.008, files_s=1.5, waiting_s=0.01),),
)


def test_a_run_is_like_others(tmp_path: Path) -> None:
    cost = run_instantly(tmp_path / "run", ("full", "mepic"), samples=8)
    run = read_run(tmp_path / "run")
    assert run.manifest["status"] == "complete"
    assert cost.requests == len(run.rows) == 16
    assert len({row.cluster for row in run.rows}) == 8 // QUESTIONS
    assert {row.score for row in run.rows} == {0.0, 1.0}
    assert set(run.ledger) == {"full", "mepic"}
    assert (tmp_path / "run" / "memory.png").exists()
    assert min(cost.prepare_s, cost.serve_s, cost.files_s) > 0
    again = [row.text for row in run.rows]
    run_instantly(tmp_path / "other", ("full", "mepic"), samples=8, seed=1)
    assert [row.text for row in read_run(tmp_path / "other").rows] != again


def test_everything_is_measured_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from picbench.measure.harness import harness_speed

    asked: list[list[str]] = []

    def timed(name: str, arguments: list[str], repeats: int) -> CommandTimes:
        asked.append(arguments)
        if name == "report":
            (Path(arguments[-1]) / "report.html").write_text("page")
        return CommandTimes(name, (0.1,) * repeats, (0.2,) * repeats)

    monkeypatch.setattr(harness_speed, "time_command", timed)
    monkeypatch.setattr(harness_speed, "ARMS", ("full", "mepic"))
    monkeypatch.setattr(harness_speed, "LIMIT_MS", 1e6)
    flags = ["--samples", "4", "--requests", "4", "--repeats", "1", "--output", str(tmp_path)]
    result = CliRunner().invoke(main, ["measure", "harness", *flags])
    assert result.exit_code == 0, result.output
    assert [arguments[0] for arguments in asked] == ["--help", "list", "compare", "report"]
    found = json.loads((tmp_path / "harness-speed.json").read_text())
    assert found["report_bytes"] == 4
    assert len(found["runs"]) == 1
    assert (tmp_path / "harness-speed.md").read_text().strip() == result.stdout.strip()


@pytest.mark.parametrize(
    ("change", "excess"),
    [
        ({"commands": (CommandTimes("--help", (0.1, 0.4, 0.5), (9.0,)),)}, "--help takes 0.40 s"),
        ({"report_bytes": 5_100_000}, "a report has 5.1 MB"),
        ({"runs": (replace(FAST.runs[0], serve_s=0.02),)}, "a request costs 1.20 ms"),
    ],
)
def test_what_takes_too_long_is_said(change: dict[str, object], excess: str) -> None:
    assert FAST.excesses() == []
    facts = FACTS | {"load": [1.0], "commit": "c"}
    assert "All limits are kept." in render(FAST, facts)
    slow = replace(FAST, **change)
    assert slow.excesses() == [excess]
    assert f"Too much: {excess}." in render(slow, facts)


def test_commands_are_timed_apart() -> None:
    found = time_command("--help", ["--help"], 2)
    assert len(found.cpu_s) == len(found.wall_s) == 2
    assert min(found.cpu_s) > 0
    with pytest.raises(EngineError, match="picbench nonsense ended with exit code 2"):
        time_command("nonsense", ["nonsense"], 1)
