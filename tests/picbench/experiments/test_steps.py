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
from picbench.experiments.steps import PAPERS, CheckStep, measure, steps
from picbench.papers import settings as paper_settings
from picbench.run.measurements import AllSteps
from picbench.store import provenance

#: Steps that say whether the engine is right, and those that say how fast, which follow.
CHECKS = {"kernels-ok", "alone", "architectures", "storm-tp2"}
CHECKS |= {
    f"{check}-{d}" for check in ("engine", "accuracy", "storm") for d in ("float32", "bfloat16")
}
MEASUREMENTS = ("kernels", "shared-decode", "engine-comparison", "host-tier", "small-steps")
MEASUREMENTS += ("decode-load", "decode-sharing", "load-report", "scaling-2")
LATER = ("break-even", "profile", *(f"paper-{paper}" for paper in PAPERS))

Command = tuple[str, ...]


class Steps:
    """Three steps, each of which leaves a word in a file."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.log, self.monkeypatch = folder, folder / "log", monkeypatch

    def run(self, *only: str, redo: bool = False, commit: str = "c0ffee", **ends: str) -> None:
        """Run the steps; `ends` is what the commands of some do last."""
        found = [
            CheckStep(name, f"says {name}", self.say(name, ends.get(name, "pass")))
            for name in ("first", "second", "third")
        ]
        self.run_these(found, only=only, redo=redo, commit=commit)

    def run_these(self, found: Sequence[CheckStep], **settings: Any) -> None:
        self.monkeypatch.setattr("picbench.experiments.steps.steps", lambda *_: found)
        measure(AllSteps(runs=self.folder / "runs", **settings))

    def say(self, word: str, end: str = "pass") -> Command:
        script = f"open({str(self.log)!r}, 'a').write({word + ' '!r}); {end}"
        return (sys.executable, "-c", script)

    @property
    def said(self) -> list[str]:
        return self.log.read_text().split() if self.log.exists() else []

    @property
    def notes(self) -> list[str]:
        return sorted(path.stem for path in (self.folder / "runs").glob("*.done"))


@pytest.fixture
def three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Steps:
    monkeypatch.setattr(provenance, "gpus", lambda: [{"name": "G"}])
    return Steps(tmp_path, monkeypatch)


def test_every_step_runs_in_order_once(three: Steps, capsys: pytest.CaptureFixture[str]) -> None:
    three.run()
    assert three.said == three.notes == ["first", "second", "third"]
    done = json.loads((three.folder / "runs" / "second.done").read_text())
    assert done["commit"] == "c0ffee" and done["seconds"] >= 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "first: says first"
    assert lines[-1].startswith("third: ok, ")
    three.run()
    assert len(three.said) == 3
    assert "first: done before (--redo repeats it)" in capsys.readouterr().out


def test_steps_are_repeated_at_another_commit_or_where_that_is_asked(three: Steps) -> None:
    three.run("first")
    three.run("first", commit="decade")
    three.run("first", commit="decade")
    assert three.said == ["first"] * 2
    three.run("third", "first", redo=True, commit="decade")
    assert three.said[2:] == ["first", "third"]
    assert three.notes == ["first", "third"]


@pytest.mark.parametrize(
    ("there", "visible", "enough"),
    [(1, None, False), (2, None, True), (2, "1", False), (2, "0,1", True)],
)
def test_a_step_for_more_gpus_is_named_and_left_out(
    three: Steps,
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
    found = [CheckStep("two", "on two", three.say("two"), 2), CheckStep("a", "", three.say("a"))]
    three.run_these(found, commit="c")
    assert three.said == [*(["two"] if enough else []), "a"]
    told = "two: not run, it needs 2 GPUs and there are 1" in capsys.readouterr().out
    assert told is not enough
    assert ("two" in three.notes) is enough


@pytest.mark.parametrize(
    "end", ["raise SystemExit(1)", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
)
def test_nothing_runs_after_a_command_that_fails_until_it_does_not(three: Steps, end: str) -> None:
    with pytest.raises(InvalidRun, match="step second failed: ") as error:
        three.run(second=end)
    assert (error.value.exit_code, error.value.hint) == (3, "nothing after it was run")
    assert three.said == ["first", "second"]
    assert three.notes == ["first"]
    three.run()
    assert three.said == ["first", "second", "second", "third"]


def test_an_unknown_step_stops_all_of_them(three: Steps) -> None:
    with pytest.raises(ConfigError, match="`only` secnd: no such step") as error:
        three.run("first", "secnd")
    assert error.value.hint == "did you mean 'second'?"
    assert three.said == []


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, CheckStep]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return {step.name: step for step in steps(tmp_path / "out", tmp_path / "runs", "abc")}


def after(step: CheckStep, flag: str) -> str:
    """The value of a flag."""
    return step.command[step.command.index(flag) + 1]


def test_no_measurement_comes_before_a_check(found: dict[str, CheckStep]) -> None:
    assert set(PAPERS) == set(paper_settings.PAPERS)
    names = list(found)
    last = max(names.index(name) for name in CHECKS)
    assert last < min(names.index(name) for name in (*MEASUREMENTS, *LATER))
    gpus = {name: step.gpus for name, step in found.items() if step.gpus > 1}
    large = {"engine-tp4": 4, "scaling-4": 4}
    assert gpus == {"engine-tp2": 2, "storm-tp2": 2, "scaling-2": 2} | large


@pytest.mark.parametrize("gpus", [2, 4])
def test_models_of_checks_can_be_divided_among_the_gpus(
    found: dict[str, CheckStep], gpus: int
) -> None:
    model = Path(after(found[f"engine-tp{gpus}"], "--model"))
    config = json.loads((model / "config.json").read_bytes())
    heads = (config["num_attention_heads"], config["num_key_value_heads"])
    assert [count % gpus for count in heads] == [0, 0]


def test_all_flags_and_tests_that_are_called_exist(found: dict[str, CheckStep]) -> None:
    ours = [s.command for s in found.values() if s.command[2] == "picbench"]
    assert all(flags(command) for command in ours)
    assert {command[3] for command in ours} == {"measure", "reproduce"}
    measured = {command[4] for command in ours if command[3] == "measure"}
    assert measured >= {"oracle", "accuracy", "storm", "scaling", "engine-comparison"}
    folders = [word for word in found["kernels-ok"].command[3:] if word.startswith("tests/")]
    checkout = Path(__file__).parents[3]
    assert folders
    assert all(list((checkout / folder).glob("test_*.py")) for folder in folders)


def test_what_is_measured_is_used_by_what_comes_later(
    tmp_path: Path, found: dict[str, CheckStep]
) -> None:
    grid = Path(after(found["profile"], "--grid"))
    assert str(grid.parent) == after(found["break-even"], "--output")
    assert "--scores" not in found["paper-epic"].command
    (tmp_path / "testbed" / "algorithms").mkdir(parents=True)
    known = {step.name: step for step in steps(tmp_path / "out", tmp_path / "runs", None)}
    assert after(known["paper-epic"], "--scores") == str(tmp_path / "testbed" / "algorithms")


def test_the_name_of_the_code_reaches_what_is_written(
    tmp_path: Path, found: dict[str, CheckStep]
) -> None:
    for name in ("accuracy-float32", "alone", *MEASUREMENTS, *LATER):
        assert after(found[name], "--commit") == "abc"
        written = after(found[name], "--output")
        assert str(tmp_path) in written if name in LATER else written == str(tmp_path / "out")
    unnamed = steps(tmp_path, tmp_path, None)
    assert not any("--commit" in step.command for step in unnamed)


def flags(command: Command) -> dict[str, Any]:
    """What a command of picbench is called with; a usage error for a flag that it does not have."""
    found: click.Command = picbench.cli.main
    rest = list(command[3:])
    while isinstance(found, click.Group):
        found = found.commands[rest.pop(0)]
    return found.make_context(found.name, rest).params
