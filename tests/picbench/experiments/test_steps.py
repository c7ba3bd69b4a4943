"""The steps of `make gpu-check`: which run, which do not, and what they call."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import pytest

import picbench.cli
from picbench.errors import ConfigError, InvalidRun
from picbench.experiments.steps import PAPERS, CheckStep, Command, run_steps, steps
from picbench.papers import settings as paper_settings
from picbench.store import provenance

#: Steps that say whether the engine is right, and are followed by those that say how fast.
CHECKS = (
    "kernels-ok",
    "engine-float32",
    "accuracy-float32",
    "engine-bfloat16",
    "alone",
    "architectures",
    "storm-float32",
    "storm-bfloat16",
    "storm-tp2",
)
MEASUREMENTS = (
    "kernels",
    "shared-decode",
    "engine-comparison",
    "host-tier",
    "small-steps",
    "decode-load",
    "decode-sharing",
    "load-report",
    "scaling-2",
)
LATER = ("break-even", "profile", "paper-mepic", "paper-epic", "paper-minipic", "paper-cacheblend")


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "gpus", lambda: [{"name": "G"}])


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Where the commands of the tests leave a word each."""
    return tmp_path / "log"


def say(log: Path, word: str, end: str = "pass") -> Command:
    """A command that adds a word to a file, and ends somehow."""
    return (sys.executable, "-c", f"open({str(log)!r}, 'a').write({word + ' '!r}); {end}")


def said(log: Path) -> list[str]:
    return log.read_text().split() if log.exists() else []


def three(log: Path, end: str = "pass") -> list[CheckStep]:
    """Three steps, of which the one in the middle ends somehow."""
    return [
        CheckStep("first", "one command", say(log, "a")),
        CheckStep("second", "another one", say(log, "b", end)),
        CheckStep("third", "one more", say(log, "c")),
    ]


def run(
    found: Sequence[CheckStep],
    tmp_path: Path,
    *only: str,
    redo: bool = False,
    commit: str = "c0ffee",
) -> None:
    run_steps(found, tmp_path / "runs", only, commit, redo=redo)


def notes(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "runs").glob("*"))


def test_every_step_runs_in_order(
    tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(three(log), tmp_path)
    assert said(log) == ["a", "b", "c"]
    assert notes(tmp_path) == ["first.done", "second.done", "third.done"]
    assert json.loads((tmp_path / "runs" / "second.done").read_text())["seconds"] >= 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "first: one command"
    assert lines[-1].startswith("third: ok, ")


def test_what_was_done_at_another_commit_is_repeated(tmp_path: Path, log: Path) -> None:
    run(three(log), tmp_path, "first")
    run(three(log), tmp_path, "first", commit="decade")
    run(three(log), tmp_path, "first", commit="decade")
    assert said(log) == ["a", "a"]


@pytest.mark.parametrize(
    ("there", "visible", "enough"),
    [(1, None, False), (2, None, True), (2, "1", False), (2, "0,1", True)],
)
def test_a_step_for_more_gpus_is_named_and_left_out(
    tmp_path: Path,
    log: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    there: int,
    visible: str | None,
    enough: bool,
) -> None:
    """GPUs that are hidden do not count."""
    monkeypatch.setattr(provenance, "gpus", lambda: [{"name": "G"}] * there)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    run([CheckStep("two", "on two GPUs", say(log, "two"), gpus=2), *three(log)], tmp_path)
    assert said(log) == [*(["two"] if enough else []), "a", "b", "c"]
    told = "two: not run, it needs 2 GPUs and there are 1" in capsys.readouterr().out
    assert told is not enough
    assert ("two.done" in notes(tmp_path)) is enough


def test_what_is_done_is_not_repeated_unless_asked_for(
    tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(three(log), tmp_path, "first")
    capsys.readouterr()
    run(three(log), tmp_path)
    assert said(log) == ["a", "b", "c"]
    assert "first: done before (--redo repeats it)" in capsys.readouterr().out
    run(three(log), tmp_path, "third", redo=True)
    assert said(log) == ["a", "b", "c", "c"]
    run(three(log), tmp_path, redo=True)
    assert said(log)[4:] == ["a", "b", "c"]


def test_only_named_steps_run_and_in_the_order_of_all(tmp_path: Path, log: Path) -> None:
    run(three(log), tmp_path, "third", "first")
    assert said(log) == ["a", "c"]
    assert notes(tmp_path) == ["first.done", "third.done"]


@pytest.mark.parametrize(
    "end", ["raise SystemExit(1)", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
)
def test_nothing_runs_after_a_command_that_fails(tmp_path: Path, log: Path, end: str) -> None:
    with pytest.raises(InvalidRun, match="step second failed: ") as error:
        run(three(log, end), tmp_path)
    assert (error.value.exit_code, error.value.hint) == (3, "nothing after it was run")
    assert said(log) == ["a", "b"]
    assert notes(tmp_path) == ["first.done"]


def test_a_later_call_goes_on_at_the_step_that_failed(tmp_path: Path, log: Path) -> None:
    with pytest.raises(InvalidRun):
        run(three(log, "raise SystemExit(1)"), tmp_path)
    run(three(log), tmp_path)
    assert said(log) == ["a", "b", "b", "c"]


def test_an_unknown_step_stops_all_of_them(tmp_path: Path, log: Path) -> None:
    with pytest.raises(ConfigError, match="`only` secnd: no such step") as error:
        run(three(log), tmp_path, "first", "secnd")
    assert error.value.hint == "did you mean 'second'?"
    assert said(log) == []


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, CheckStep]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return {step.name: step for step in steps(tmp_path / "out", tmp_path / "runs", "abc")}


def test_no_measurement_comes_before_a_check(found: dict[str, CheckStep]) -> None:
    names = list(found)
    last = max(names.index(name) for name in CHECKS)
    assert last < min(names.index(name) for name in (*MEASUREMENTS, *LATER))
    assert {name: step.gpus for name, step in found.items() if step.gpus > 1} == {
        "engine-tp2": 2,
        "engine-tp4": 4,
        "storm-tp2": 2,
        "scaling-2": 2,
        "scaling-4": 4,
    }


@pytest.mark.parametrize("gpus", [2, 4])
def test_models_of_checks_can_be_divided_among_the_gpus(
    found: dict[str, CheckStep], gpus: int
) -> None:
    command = found[f"engine-tp{gpus}"].command
    model = Path(command[command.index("--model") + 1])
    config = json.loads((model / "config.json").read_bytes())
    heads = (config["num_attention_heads"], config["num_key_value_heads"])
    assert [count % gpus for count in heads] == [0, 0]


def test_steps_have_names_of_their_own(tmp_path: Path, found: dict[str, CheckStep]) -> None:
    assert len(found) == len(list(steps(tmp_path, tmp_path, None)))
    assert all(step.command and step.summary for step in found.values())


def test_all_flags_of_picbench_exist(found: dict[str, CheckStep]) -> None:
    ours = [s.command for s in found.values() if s.command[2] == "picbench"]
    assert all(flags(command) for command in ours)
    assert {command[3] for command in ours} == {"measure", "reproduce"}
    measured = {command[4] for command in ours if command[3] == "measure"}
    assert measured >= {"oracle", "accuracy", "storm", "scaling", "engine-comparison"}


def test_papers_take_scores_that_are_there(tmp_path: Path, found: dict[str, CheckStep]) -> None:
    assert "--scores" not in found["paper-epic"].command
    (tmp_path / "testbed" / "algorithms").mkdir(parents=True)
    known = {step.name: step for step in steps(tmp_path / "out", tmp_path / "runs", None)}
    command = known["paper-epic"].command
    assert command[command.index("--scores") + 1] == str(tmp_path / "testbed" / "algorithms")


def test_every_paper_is_a_step() -> None:
    assert set(PAPERS) == set(paper_settings.PAPERS)


def test_predictions_are_made_from_the_grid_that_was_measured(found: dict[str, CheckStep]) -> None:
    measured, checked = (found[name].command for name in ("break-even", "profile"))
    grid = Path(checked[checked.index("--grid") + 1])
    assert str(grid.parent) == measured[measured.index("--output") + 1]


def test_what_is_tested_is_there(found: dict[str, CheckStep]) -> None:
    command = found["kernels-ok"].command
    folders = [word for word in command[3:] if word.startswith("tests/")]
    checkout = Path(__file__).parents[3]
    assert folders
    assert all(list((checkout / folder).glob("test_*.py")) for folder in folders)


def test_the_name_of_the_code_reaches_what_is_written(
    tmp_path: Path, found: dict[str, CheckStep]
) -> None:
    for name in ("accuracy-float32", "alone", *MEASUREMENTS):
        command = found[name].command
        assert command[command.index("--commit") + 1] == "abc"
        assert command[command.index("--output") + 1] == str(tmp_path / "out")
    for name in LATER:
        command = found[name].command
        assert command[command.index("--commit") + 1] == "abc"
        assert str(tmp_path) in command[command.index("--output") + 1]
    unnamed = steps(tmp_path, tmp_path, None)
    assert not any("--commit" in step.command for step in unnamed)


def flags(command: Command) -> dict[str, Any]:
    """What a command of picbench is called with; a usage error for a flag that it does not have."""
    found: click.Command = picbench.cli.main
    rest = list(command[3:])
    while isinstance(found, click.Group):
        found = found.commands[rest.pop(0)]
    return found.make_context(found.name, rest).params
