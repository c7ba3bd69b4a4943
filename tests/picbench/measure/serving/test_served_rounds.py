"""Rounds over engines: the order, what is kept, and what a stopped measurement goes on with."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from picbench.engines.config import EngineConfig
from picbench.measure.serving import served_rounds
from picbench.measure.serving.served_rounds import (
    RoundsPlan,
    ServedArm,
    ServedCell,
    estimate,
    read_rounds,
    run_rounds,
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
    cells = [ServedCell("x", arms), ServedCell("y", arms, work=3.0)]
    return RoundsPlan(tmp_path / "r.json", facts, engines, cells, rounds, seconds)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    started: list[str] = []

    def launch(name: str, config: EngineConfig, log: Path) -> LocalServer:
        assert name != "unused"
        started.append(name)
        return LocalServer(name, found)

    monkeypatch.setattr(served_rounds, "launch", launch)
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
    assert said[0].startswith("2 of 4 cells measured; left: ")
    assert said[-1].startswith("4 of 4 cells measured; left: 0 s")
    assert json.loads((tmp_path / "r.json").read_text())["provenance"] == {"commit": "c"}


def test_other_facts_begin_anew(tmp_path: Path, asked: list[str]) -> None:
    run_rounds(plan(tmp_path, 1, commit="c"), lambda _: None)
    assert read_rounds(plan(tmp_path, commit="d")).cells == {}


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
    assert left.left is not None
    assert left.left > 0
