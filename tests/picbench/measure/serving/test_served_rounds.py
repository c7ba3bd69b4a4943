"""Rounds over engines: the order, what is kept, and what a stopped measurement goes on with."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from picbench.engines.config import EngineConfig
from picbench.errors import EngineError
from picbench.experiments import engines as started_engines
from picbench.experiments import rounds as served_rounds
from picbench.experiments.rounds import (
    RoundsFound,
    RoundsPlan,
    ServedArm,
    ServedCell,
    estimate,
    run_rounds,
    write_rounds,
)


class LocalServer:
    """Calls measures with itself in place of an engine; they note what they are asked."""

    def __init__(self, name: str, asked: list[str]) -> None:
        self.name, self.asked = name, asked
        self.compilations = [f"kernel of {name}"]

    def ready(self) -> None: ...

    def watch_compilations(self) -> None: ...

    def call(self, function: Callable[[Any], Any]) -> Any:
        return function(self)

    def close(self) -> None: ...

    def kill(self) -> None: ...


def note(engine: Any, name: str, *, arm: str) -> dict[str, float]:
    engine.asked.append(f"{arm} {name}")
    return {"value": float(len(engine.asked))}


def plan(tmp_path: Path, rounds: int = 2, seconds: float = 0.0, **facts: Any) -> RoundsPlan:
    arms = {
        "a": ServedArm("one", partial(note, arm="a"), partial(note, arm="warm a")),
        "b": ServedArm("two", partial(note, arm="b")),
    }
    engines = {name: EngineConfig("m") for name in ("one", "two", "unused")}
    cells = [ServedCell("x", arms), ServedCell("y", arms, seconds=3.0)]
    return RoundsPlan(tmp_path / "r.json", facts, engines, cells, rounds, seconds)


def fail(engine: Any, name: str, *, arm: str) -> dict[str, float]:
    error = EngineError(f"arm {arm}: no memory", hint="buy some")
    error.add_note("its log")
    raise error


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    started: list[str] = []

    def launch(name: str, config: EngineConfig, log: Path) -> LocalServer:
        assert name != "unused"
        started.append(name)
        return LocalServer(name, found)

    monkeypatch.setattr(started_engines, "launch", launch)
    return found


def test_arms_alternate_and_another_one_is_first_in_each_round(
    tmp_path: Path, asked: list[str]
) -> None:
    found = run_rounds(plan(tmp_path), lambda _: None)
    ours = [each for each in asked if each[2:].startswith("x")]
    assert ours == ["b x 1", "a x 1", "a x 2", "b x 2"]
    assert asked.count("warm a x 0") == asked.count("warm a y 0") == 1
    assert asked.index("warm a x 0") < asked.index("b x 1")
    assert {arm: len(figures["value"]) for arm, figures in found.cells["y"].items()} == {
        "a": 2,
        "b": 2,
    }
    assert found.compiled == {"one": ["kernel of one"], "two": ["kernel of two"]}


def test_what_is_done_is_kept_and_the_rest_goes_on(tmp_path: Path, asked: list[str]) -> None:
    run_rounds(plan(tmp_path, 1, commit="c"), lambda _: None)
    before = list(asked)
    said: list[str] = []
    found = run_rounds(plan(tmp_path, 2, commit="c"), said.append)
    new = [each for each in asked[len(before) :] if not each.startswith("warm")]
    assert sorted(new) == ["a x 2", "a y 2", "b x 2", "b y 2"]
    assert [found.rounds(cell) for cell in "xy"] == [2, 2]
    assert said[0].startswith("2 of 4 cells measured; left: about ")
    assert said[-1].startswith("4 of 4 cells measured; left: about 0 s")
    assert json.loads((tmp_path / "r.json").read_text())["provenance"] == {"commit": "c"}


def test_other_facts_start_over(tmp_path: Path, asked: list[str]) -> None:
    run_rounds(plan(tmp_path, 1, commit="c"), lambda _: None)
    assert plan(tmp_path, commit="d").read().cells == {}
    said: list[str] = []
    run_rounds(plan(tmp_path, 1, commit="d"), said.append)
    assert said[0] == "r.json was measured with another commit: started over"


def test_nothing_begins_that_would_not_end_in_time(
    tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter(range(0, 1000, 10))  # Each look at the clock takes ten seconds.
    monkeypatch.setattr(served_rounds.time, "monotonic", lambda: float(next(times)))
    found = run_rounds(plan(tmp_path, 5, seconds=90.0), lambda _: None)
    done = sum(found.rounds(cell) for cell in "xy")
    assert 0 < done < 10
    left = estimate(plan(tmp_path, 5), found)
    assert (left.done, left.total) == (done, 10)
    assert left.left > 0


def test_before_anything_is_measured_cells_take_what_is_guessed(tmp_path: Path) -> None:
    left = estimate(plan(tmp_path, 2), RoundsFound({}))
    assert str(left) == "0 of 4 cells measured; left: about 8 s, and the engines' start"
    found = RoundsFound({}, starts=[70.0])
    found.note("x", {"a": {"value": 1.0}}, 10.0)
    # Ten times as long as guessed: the other one, too.
    assert str(estimate(plan(tmp_path, 2), found)) == (
        "1 of 4 cells measured; left: about 70 s, and the engines' start (70 s)"
    )


def test_what_matters_most_comes_first_and_gets_no_more_rounds_than_it_needs(
    tmp_path: Path, asked: list[str]
) -> None:
    made = plan(tmp_path, 5)
    x, y = made.cells
    cells = [replace(x, rank=1), replace(y, most=3)]
    found = run_rounds(replace(made, cells=cells), lambda _: None)
    order = [word.split()[1:] for word in asked if word.startswith("a")]
    first, more = [["y", str(n)] for n in (1, 2, 3)], [["x", str(n)] for n in (1, 2, 3, 4, 5)]
    assert order == [*first, *more]
    assert replace(made, cells=cells).done(found)
    assert not made.done(found)


def test_a_cell_that_fails_is_said_and_loses_no_other_one(tmp_path: Path, asked: list[str]) -> None:
    made = plan(tmp_path, 2)
    arms = {**made.cells[0].arms, "b": ServedArm("two", partial(fail, arm="b"))}
    cells = [replace(made.cells[0], arms=arms), made.cells[1]]
    said: list[str] = []
    kept: list[int] = []
    found = run_rounds(
        replace(made, cells=cells), said.append, lambda f: kept.append(f.rounds("y"))
    )
    assert [found.rounds(cell) for cell in "xy"] == [0, 2]
    assert sum("x, round 1: failed, arm b: no memory (buy some), " in line for line in said) == 1
    assert found.failures["x"].splitlines() == ["arm b: no memory (buy some)", "its log"]
    assert kept == sorted(kept)
    assert kept[-1] == 2
    again = run_rounds(made, said.append)
    assert (again.failures, again.rounds("x")) == ({}, 2)


def test_processes_that_measure_other_cells_keep_each_other_s(
    tmp_path: Path, asked: list[str]
) -> None:
    made = plan(tmp_path, 2)

    def meanwhile(_: RoundsFound) -> None:
        if not made.read().rounds("y"):
            other = RoundsFound({}, compiled={"one": ["theirs"]})
            other.note("y", {"a": {"value": 7.0}}, 1.0)
            write_rounds(made.path, other)

    run_rounds(replace(made, cells=made.cells[:1]), lambda _: None, meanwhile)
    found = made.read()
    assert (found.rounds("x"), found.rounds("y")) == (2, 1)
    assert found.cells["y"]["a"]["value"] == [7.0]
    assert found.compiled["one"] == ["kernel of one", "theirs"]
