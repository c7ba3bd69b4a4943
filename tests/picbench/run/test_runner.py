"""The runner: order, what is kept, what a stopped experiment resumes from, time, and parts."""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from failing_measures import gone, wrong
from harness_fakes import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from local_servers import LocalLauncher, note

from picbench.engines.config import EngineConfig
from picbench.errors import ConfigError, EngineError
from picbench.run.measurements import InRounds, Measured, Outcome
from picbench.run.runner import (
    Cell,
    Experiment,
    ExperimentPlan,
    RoundsExperiment,
    RoundsRecord,
    ServedArm,
    TimeBudget,
    interleaved,
    run,
    share,
    started_engines,
)
from picbench.run.server import Server
from picbench.tables.page import FigureRatio, FigureTable

TWO = {name: EngineConfig("m") for name in ("one", "two")}
ARMS = {
    "a": ServedArm("one", partial(note, arm="a"), partial(note, arm="warm a")),
    "b": ServedArm("two", partial(note, arm="b")),
}
CELLS = (Cell("x", ARMS), Cell("y", ARMS, seconds=3.0))


def plan(rounds: int = 2, cells: Sequence[Cell] = CELLS, **others: Any) -> ExperimentPlan:
    given: dict[str, Any] = {"name": "r", "facts": {}, "engines": TWO, "cells": cells} | others
    return ExperimentPlan(rounds=rounds, **given)


def record(folder: Path, made: ExperimentPlan) -> RoundsRecord:
    return RoundsRecord.read(folder / "r.json", made.facts)


def measure(
    folder: Path, made: ExperimentPlan, budget: TimeBudget | None = None
) -> tuple[RoundsRecord, list[str], list[str]]:
    """The record, what arms were asked but for warm-ups, and what was said."""
    found, said, launcher = record(folder, made), list[str](), LocalLauncher()
    run(made, found, said.append, budget, launcher)
    return found, [each for each in launcher.asked if not each.startswith("warm")], said


def quickly(made: ExperimentPlan, launcher: Any) -> RoundsRecord:
    """A record in memory, of which nothing is said."""
    found = RoundsRecord()
    run(made, found, lambda _: None, launcher=launcher)
    return found


def fail(engine: Any, name: str) -> dict[str, float]:
    error = EngineError("arm b: no memory", hint="buy some")
    error.add_note("its log")
    raise error


def failing(cell: Cell) -> Cell:
    return replace(cell, arms={**cell.arms, "b": ServedArm("two", fail)})


class Clock:
    """Seconds that pass whenever they are asked for."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def test_arms_alternate_and_another_one_is_first_in_each_round() -> None:
    launcher = LocalLauncher()
    found, asked = quickly(plan(), launcher), launcher.asked
    rounds = ["b x 1", "a x 1", "a x 2", "b x 2"]
    assert [each for each in asked if each[2:].startswith("x")] == rounds
    assert asked.count("warm a x 0") == asked.count("warm a y 0") == 1
    assert asked.index("warm a x 0") < asked.index("b x 1")
    assert {arm: len(values["value"]) for arm, values in found.cells["y"].items()} == {
        "a": 2,
        "b": 2,
    }
    assert found.compiled == {"one": ["kernel of one"], "two": ["kernel of two"]}
    assert {server.ended for server in launcher.servers} == {"closed"}


def test_what_is_done_is_kept_and_the_rest_is_measured(tmp_path: Path) -> None:
    measure(tmp_path, plan(1, facts={"commit": "c"}))
    found, asked, said = measure(tmp_path, plan(2, facts={"commit": "c"}))
    assert sorted(asked) == ["a x 2", "a y 2", "b x 2", "b y 2"]
    assert [len(found.seconds.get(cell, ())) for cell in "xy"] == [2, 2]
    assert said[0].startswith("2 of 4 cells measured; left: about ")
    assert said[-1].startswith("4 of 4 cells measured; left: about 0 s")
    assert json.loads((tmp_path / "r.json").read_text())["provenance"] == {"commit": "c"}
    assert measure(tmp_path, plan(2, facts={"commit": "c"}))[1] == []
    # Rounds of other facts are not continued.
    assert record(tmp_path, plan(facts={"commit": "d"})).cells == {}


class Timed(Cell):
    """Takes as long as is guessed, by the test's clock."""

    clock = Clock(0.0)

    def serve(self, engines: Any, number: int) -> Any:
        self.clock.now += self.seconds
        return super().serve(engines, number)


@settings(max_examples=25)
@given(st.integers(1, 5), st.floats(1, 40), st.integers(1, 4))
def test_any_stops_and_parts_come_to_the_same_rounds(
    tmp_path_factory: pytest.TempPathFactory, rounds: int, seconds: float, parts: int
) -> None:
    """Each call measures only what is missing, and begins nothing that would not end in time."""
    folder = tmp_path_factory.mktemp("resumed")
    cells = [Timed(cell.name, cell.arms, cell.seconds) for cell in CELLS]
    asked = Counter[str]()
    for k in range(1, parts + 1):
        made, time = plan(rounds, cells, part=(k, parts)), seconds
        while not made.done(record(folder, made)):
            budget = TimeBudget(time, Timed.clock)
            _, new, _ = measure(folder, made, budget)
            asked.update(new)
            assert budget.spent <= time
            time = max(time, 3.0)  # What the longest cell takes.
    assert plan(rounds).done(record(folder, plan(rounds)))
    assert set(asked.values()) == {1}
    assert len(asked) == 2 * 2 * rounds


def test_before_anything_is_measured_cells_take_what_is_guessed(tmp_path: Path) -> None:
    found = record(tmp_path, plan())
    assert plan().progress(found) == (
        "0 of 4 cells measured; left: about 8 s, and the engines' start"
    )
    found.starts.append(70.0)
    found.add("x", {"a": {"value": 1.0}}, 10.0)
    # Ten times as long as guessed: the other one, too.
    assert plan().progress(found) == (
        "1 of 4 cells measured; left: about 70 s, and the engines' start (70 s)"
    )


def test_what_matters_most_comes_first_and_gets_no_more_rounds_than_it_needs(
    tmp_path: Path,
) -> None:
    x, y = CELLS
    made = plan(5, [replace(x, rank=1), replace(y, most=3)])
    found, asked, _ = measure(tmp_path, made)
    order = [word.split()[1:] for word in asked if word.startswith("a")]
    first, more = [["y", str(n)] for n in (1, 2, 3)], [["x", str(n)] for n in (1, 2, 3, 4, 5)]
    assert order == [*first, *more]
    assert made.done(found)
    assert not plan(5).done(found)


def test_a_cell_that_fails_is_said_and_loses_no_other_one(tmp_path: Path) -> None:
    made = plan(2, [failing(CELLS[0]), CELLS[1]])
    found, _, said = measure(tmp_path, made)
    assert [len(found.seconds.get(cell, ())) for cell in "xy"] == [0, 2]
    assert sum("x, round 1: failed, arm b: no memory (buy some), " in line for line in said) == 1
    kept = record(tmp_path, plan())
    assert kept.failures["x"].splitlines() == ["arm b: no memory (buy some)", "its log"]
    again, _, _ = measure(tmp_path, plan(2))
    assert (again.failures, len(again.seconds["x"])) == ({}, 2)


@given(st.lists(st.integers()), st.integers(1, 5))
def test_parts_are_all_of_it_and_each_once(items: list[int], parts: int) -> None:
    shares = [share(items, (k, parts)) for k in range(1, parts + 1)]
    assert sorted(item for each in shares for item in each) == sorted(items)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_cell_may_be_served_in_its_own_way() -> None:
    class Twice(Cell):
        def serve(self, engines: Any, number: int) -> dict[str, dict[str, Any]]:
            return {"each": {name: engines[name].name * number for name in engines}}

    found = quickly(plan(2, [Twice("x")]), LocalLauncher()).found
    assert found == {"each": {"one": ["one", "oneone"], "two": ["two", "twotwo"]}}


def test_a_budget_refuses_what_is_too_long_and_all_after_that() -> None:
    budget = TimeBudget(100.0, Clock(0.0))
    assert budget.allows(90.0)
    assert not budget.allows(100.5)
    assert budget.stopped
    assert not budget.allows(1.0)
    assert TimeBudget(0.0).allows(1e9)


def measures(engine: Any, name: str) -> dict[str, float]:
    """The number of the round, and a figure that one arm alone has."""
    number = float(name.split()[-1])
    return note(engine, name) and {"number": number} | (
        {"ours": -number} if engine.name == "two" else {}
    )


def test_interleaved_measures_come_one_after_another_each_warmed_up_first() -> None:
    launcher = LocalLauncher()
    found = quickly(interleaved("r", {}, TWO, {"x": measures, "y": measures}, 2), launcher).found
    rounds = ["one {} 0", "two {} 0", "two {} 1", "one {} 1", "one {} 2", "two {} 2"]
    assert launcher.asked == [each.format(label) for label in "xy" for each in rounds]
    assert found == {
        "one": {"number": [1.0, 2.0, 1.0, 2.0]},
        "two": {"number": [1.0, 2.0, 1.0, 2.0], "ours": [-1.0, -2.0, -1.0, -2.0]},
    }


def test_an_error_where_nothing_is_resumed_ends_all() -> None:
    launcher = LocalLauncher()
    with pytest.raises(EngineError, match="no memory"):
        quickly(interleaved("r", {}, TWO, {"x": fail, "y": measures}, 2), launcher)
    assert launcher.asked == []
    assert {server.ended for server in launcher.servers} == {"killed"}


@pytest.mark.parametrize(
    ("end", "said"),
    [(gone, "one: the engine's process ended with exit code 9"), (wrong, "one: ValueError: not x")],
)
def test_an_engine_that_fails_is_named_and_none_is_left(
    monkeypatch: pytest.MonkeyPatch, end: Any, said: str
) -> None:
    # The child process must find the fake engine.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
    monkeypatch.setattr(Server, "engine", FakeEngine)
    started: list[Server] = []

    def begin(*given: Any) -> Server:
        started.append(Server(*given))
        return started[-1]

    with pytest.raises(EngineError, match=said):
        quickly(interleaved("r", {}, TWO, {"x": end}, 2), begin)
    assert len(started) == 2
    assert all(server._process.poll() is not None for server in started)


@pytest.mark.engine
def test_an_engine_that_cannot_start_says_why(llama: Path) -> None:
    config = EngineConfig(str(llama), device="cpu", dtype="float32", context=1200, kv_blocks=300)
    wrong = replace(config, algorithm="mepik")
    with (
        pytest.raises(ConfigError, match="unknown algorithm 'mepik'"),
        started_engines({"bad": wrong, "good": config}),
    ):
        pass


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("picbench.run.runner.Server", LocalLauncher())


ONE_CALL = Experiment(
    plan=lambda _: interleaved("r", {"gpu": "G"}, TWO, {"x": measures}, 2),
    title="Numbers",
    about="On {gpu}.",
    tables=[FigureTable({"number": "a number", "ours": "ours", "other": "none"}, digits=0)],
    ratios=[
        FigureRatio("group", "ratio", [(("two", "ours"), ("one", "number"))]),
        FigureRatio("group", "missing", [(("two", "other"), ("one", "number"))]),
    ],
    sentences=["It is {ratio:.1f}.", "It is {missing:.1f}."],
)


def test_an_experiment_of_one_call_writes_figures_page_and_summary(
    tmp_path: Path, local: None
) -> None:
    outcome = ONE_CALL.measure(Measured(output=tmp_path))
    assert outcome.code == 0
    assert outcome.page == (tmp_path / "r.md").read_text()
    assert (
        outcome.page
        == """\
# Numbers

On G.

|  | one | two |
| --- | ---: | ---: |
| a number | 2 (1 - 2) | 2 (1 - 2) |
| ours | - | -2 (-2 - -1) |

It is -1.0.
"""
    )
    document = json.loads((tmp_path / "r.json").read_text())
    assert document["provenance"] == {"gpu": "G"}
    assert document["found"]["two"]["ours"] == [-1.0, -2.0]
    assert json.loads((tmp_path / "summary.json").read_text()) == {"group": {"ratio": -1.0}}


IN_ROUNDS = RoundsExperiment(
    plan=lambda chosen: plan(chosen.rounds, facts={"model": chosen.served}),
    render=lambda found: f"{len(found.seconds['x'])} rounds\n" if "x" in found.cells else "",
    figures=lambda found: {"rounds": len(found.seconds["x"])},
)


def test_an_experiment_in_rounds_resumes_and_says_what_is_left(
    tmp_path: Path, local: None, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = InRounds(output=tmp_path, device="cpu", rounds=1)

    def measured(**changes: Any) -> Outcome:
        return IN_ROUNDS.measure(chosen.model_copy(update=changes))

    assert measured(estimate=True).page.startswith("0 of 2 cells measured")
    assert measured(seconds=1e-9) == Outcome("", 4)
    assert measured() == Outcome("1 rounds\n", 0)
    assert measured(rounds=2) == Outcome("2 rounds\n", 0)
    assert (tmp_path / "r.md").read_text() == "2 rounds\n"
    assert json.loads((tmp_path / "summary.json").read_text()) == {"rounds": 2}
    capsys.readouterr()
    measured(model="testbed")
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "r.json was measured with another model: started over"
