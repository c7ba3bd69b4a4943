"""Rounds of measurements over engines that are up at once; what is measured stays in a file.

A round serves every cell once, and in a cell all arms, of which another one is first in each round.
Cells come in a random order, so that what a run got done before its time was over is even.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from picbench.arms.server import Server, launch
from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.measure.engine.interleaved import Measure
from picbench.output.json_file import write_json

#: Figures of a cell by arm and name, round by round.
CellFigures = dict[str, dict[str, list[float]]]


@dataclass(frozen=True, slots=True)
class ServedArm:
    """The engine that serves an arm, and what is measured there.

    `warm_up` is called before the first round of each process, and its figures are dropped.
    """

    engine: str
    measure: Measure
    warm_up: Measure | None = None


@dataclass(frozen=True, slots=True)
class ServedCell:
    """What all arms serve in one round; `work` is about proportional to its time."""

    name: str
    arms: Mapping[str, ServedArm]
    work: float = 1.0


@dataclass(frozen=True, slots=True)
class RoundsPlan:
    """Cells to measure for so many rounds, with these engines, into a JSON file at `path`.

    `seconds` is when no cell is begun that would not end by then (0: no limit); the start of the
    engines counts. A file with other `facts` is begun anew.
    """

    path: Path
    facts: Mapping[str, Any]
    engines: Mapping[str, EngineConfig]
    cells: Sequence[ServedCell]
    rounds: int
    seconds: float = 0.0


@dataclass(slots=True)
class RoundsFound:
    """What was measured: figures by cell, seconds of each round of it, kernels compiled since.

    `compiled` has the kernels, by engine, that were compiled after it said that it was ready.
    """

    facts: Mapping[str, Any]
    cells: dict[str, CellFigures] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    compiled: dict[str, list[str]] = field(default_factory=dict)

    def rounds(self, cell: str) -> int:
        """Rounds of a cell that are done."""
        return len(self.seconds.get(cell, ()))

    def note(self, cell: str, figures: Mapping[str, Mapping[str, float]], seconds: float) -> None:
        """Add a round of a cell."""
        known = self.cells.setdefault(cell, {})
        for arm, values in figures.items():
            for name, value in values.items():
                known.setdefault(arm, {}).setdefault(name, []).append(value)
        self.seconds.setdefault(cell, []).append(seconds)


@dataclass(frozen=True, slots=True)
class RoundsProgress:
    """Rounds of cells that are done, all of them, and what the rest may take, in seconds.

    `left` is None before anything was measured.
    """

    done: int
    total: int
    left: float | None

    def __str__(self) -> str:
        left = "not known before a first round" if self.left is None else f"{self.left:,.0f} s"
        return f"{self.done} of {self.total} cells measured; left: {left}, and the engines' start"


def read_rounds(plan: RoundsPlan) -> RoundsFound:
    """What the plan's file has; nothing if there is none, or one with other facts."""
    if plan.path.exists():
        known = json.loads(plan.path.read_bytes())
        if known["provenance"] == json.loads(json.dumps(plan.facts)):
            return RoundsFound(plan.facts, known["cells"], known["seconds"], known["compiled"])
    return RoundsFound(plan.facts)


def estimate(plan: RoundsPlan, found: RoundsFound) -> RoundsProgress:
    """What is left; a cell that was not measured takes what others took for their work."""
    done = sum(min(plan.rounds, found.rounds(cell.name)) for cell in plan.cells)
    total = plan.rounds * len(plan.cells)
    if not done:
        return RoundsProgress(done, total, None)
    left = sum(
        (plan.rounds - found.rounds(cell.name)) * _expected(cell, plan, found)
        for cell in plan.cells
        if found.rounds(cell.name) < plan.rounds
    )
    return RoundsProgress(done, total, left)


def run_rounds(plan: RoundsPlan, say: Callable[[str], None]) -> RoundsFound:
    """Measure what is left, as long as there is time, and write it cell by cell.

    Raises the error of an engine that cannot start or fails; what was measured before is written.
    """
    found = read_rounds(plan)
    say(str(estimate(plan, found)))
    left = list(_left(plan, found))
    if not left:
        return found
    began = time.monotonic()
    with _started(plan) as engines:
        say(f"engines are up, {time.monotonic() - began:,.0f} s")
        warm = set[tuple[str, str]]()
        for number, cell in left:
            before = time.monotonic() - began
            if plan.seconds and before + _expected(cell, plan, found) > plan.seconds:
                break
            _warm_up(cell, engines, warm)
            started = time.monotonic()
            figures = _serve(cell, number, engines)
            found.note(cell.name, figures, time.monotonic() - started)
            _note_compiled(found, engines)
            _save(plan, found)
            say(f"{cell.name}, round {number}: {time.monotonic() - began:,.0f} s")
    say(str(estimate(plan, found)))
    return found


def _left(plan: RoundsPlan, found: RoundsFound) -> Iterator[tuple[int, ServedCell]]:
    """Number of the round, from 1, and cell."""
    for number in range(1, plan.rounds + 1):
        for cell in Random(number).sample(plan.cells, len(plan.cells)):
            if found.rounds(cell.name) < number:
                yield number, cell


def _expected(cell: ServedCell, plan: RoundsPlan, found: RoundsFound) -> float:
    """Seconds that a round of a cell takes; 0 before anything was measured."""
    known = found.seconds.get(cell.name)
    if known:
        return max(known)
    spent = sum(sum(found.seconds.get(c.name, ())) for c in plan.cells)
    done = sum(c.work * found.rounds(c.name) for c in plan.cells)
    return cell.work * spent / done if done else 0.0


def _warm_up(cell: ServedCell, engines: Mapping[str, Server], warm: set[tuple[str, str]]) -> None:
    for name, arm in cell.arms.items():
        if arm.warm_up is not None and (cell.name, name) not in warm:
            warm.add((cell.name, name))
            engines[arm.engine].call(partial(_apply, arm.warm_up, f"{cell.name} 0"))


def _serve(
    cell: ServedCell, number: int, engines: Mapping[str, Server]
) -> dict[str, Mapping[str, float]]:
    names = list(cell.arms)
    first = number % len(names)
    found = {}
    for name in (*names[first:], *names[:first]):
        arm = cell.arms[name]
        work = partial(_apply, arm.measure, f"{cell.name} {number}")
        found[name] = engines[arm.engine].call(work)
    return {name: found[name] for name in names}


def _apply(measure: Measure, name: str, engine: Engine) -> Mapping[str, float]:
    return measure(engine, name)


def _note_compiled(found: RoundsFound, engines: Mapping[str, Server]) -> None:
    for name, engine in engines.items():
        known = found.compiled.get(name, [])
        found.compiled[name] = sorted({*known, *engine.call(_compiled)})


def _compiled(engine: Engine) -> list[str]:
    return engine.compilations


def _watch(engine: Engine) -> None:
    engine.watch_compilations()


def _save(plan: RoundsPlan, found: RoundsFound) -> None:
    plan.path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "schema": 1,
        "provenance": found.facts,
        "cells": found.cells,
        "seconds": found.seconds,
        "compiled": found.compiled,
    }
    write_json(plan.path, document)


@contextmanager
def _started(plan: RoundsPlan) -> Iterator[Mapping[str, Server]]:
    engines: dict[str, Server] = {}
    used = {arm.engine for cell in plan.cells for arm in cell.arms.values()}
    with TemporaryDirectory(prefix="picbench-") as logs:
        try:
            for name, config in plan.engines.items():
                if name in used:
                    engines[name] = launch(name, config, Path(logs) / f"{name}.log")
            for engine in engines.values():
                engine.ready()
                engine.call(_watch)
            yield engines
            for engine in engines.values():
                engine.close()
        finally:
            for engine in engines.values():
                engine.kill()
