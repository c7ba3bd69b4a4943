"""What rounds of measurements have found, in a file that several processes may add to."""

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.errors import PicBenchError
from picbench.experiments.engines import Measure, started_engines
from picbench.files import locked, write_json
from picbench.run.server import Server
from picbench.store import provenance
from picbench.workloads import models

#: Figures of a cell by arm and name, round by round.
CellFigures = dict[str, dict[str, list[float]]]


@dataclass(slots=True)
class RoundsFound:
    """What was measured: figures by cell, and seconds of each round of it.

    `compiled` has the kernels, by engine, that were compiled after it said that it was ready,
    `starts` the seconds until all engines were, start by start, and `failures` the error of each
    cell whose last attempt failed.
    """

    facts: Mapping[str, Any]
    cells: dict[str, CellFigures] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    compiled: dict[str, list[str]] = field(default_factory=dict)
    starts: list[float] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

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
        self.failures.pop(cell, None)

    def note_compiled(self, engine: str, kernels: Collection[str]) -> None:
        """Add kernels that an engine compiled."""
        self.compiled[engine] = sorted({*self.compiled.get(engine, ()), *kernels})

    def adopt(self, other: "RoundsFound", own: Collection[str]) -> None:
        """Take over what another process has measured: all cells but those of one's `own`."""
        for name in other.cells.keys() - set(own):
            self.cells[name], self.seconds[name] = other.cells[name], other.seconds[name]
        for name in other.failures.keys() - set(own):
            self.failures[name] = other.failures[name]
        for engine, kernels in other.compiled.items():
            self.note_compiled(engine, kernels)


def read_rounds(path: Path, facts: Mapping[str, Any]) -> RoundsFound:
    """What a file has of measurements with these facts; nothing if there is none with them."""
    known = _read(path)
    if known is None or differing(path, facts):
        return RoundsFound(facts)
    return RoundsFound(
        facts,
        known["cells"],
        known["seconds"],
        known["compiled"],
        known.get("starts", []),
        known.get("failures", {}),
    )


def differing(path: Path, facts: Mapping[str, Any]) -> list[str]:
    """The facts that are others in a file, because of which it is started over."""
    known = _read(path)
    if known is None:
        return []
    before, now = known["provenance"], json.loads(json.dumps(facts))
    return sorted(name for name in {**before, **now} if before.get(name) != now.get(name))


def write_rounds(path: Path, found: RoundsFound) -> None:
    """Write all that was found."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "schema": 1,
        "provenance": found.facts,
        "cells": found.cells,
        "seconds": found.seconds,
        "compiled": found.compiled,
        "starts": found.starts,
        "failures": found.failures,
    }
    write_json(path, document)


def _read(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    known: dict[str, Any] = json.loads(path.read_bytes())
    return known


#: Rounds that all cells get before any cell gets more: the fewest that show a spread.
_FEW = 3


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
    """What all arms serve in one round.

    `seconds` is about what a round takes, for as long as none was measured. Cells of a lower `rank`
    come first. `most` is how many rounds are enough, if not all of the plan's.
    """

    name: str
    arms: Mapping[str, ServedArm]
    seconds: float = 1.0
    rank: int = 0
    most: int | None = None


@dataclass(frozen=True, slots=True)
class RoundsPlan:
    """Cells to measure for `rounds` rounds, with these engines, into a JSON file at `path`.

    `seconds` is when no cell is begun that would not end by then (0: no limit); the start of the
    engines counts. A file with other `facts` is started over.
    """

    path: Path
    facts: Mapping[str, Any]
    engines: Mapping[str, EngineConfig]
    cells: Sequence[ServedCell]
    rounds: int
    seconds: float = 0.0

    def wanted(self, cell: ServedCell) -> int:
        """Rounds of a cell."""
        return min(self.rounds, cell.most or self.rounds)

    def read(self) -> RoundsFound:
        """What the plan's file has."""
        return read_rounds(self.path, self.facts)

    def done(self, found: RoundsFound) -> bool:
        """Whether nothing is left."""
        return all(found.rounds(cell.name) >= self.wanted(cell) for cell in self.cells)


@dataclass(frozen=True, slots=True)
class RoundsProgress:
    """Rounds of cells that are done, all of them, and what the rest may take, in seconds.

    `start` is what the engines took to start the last time, None if that is not known.
    """

    done: int
    total: int
    left: float
    start: float | None = None

    def __str__(self) -> str:
        start = "" if self.start is None else f" ({self.start:,.0f} s)"
        left = f"about {self.left:,.0f} s, and the engines' start{start}"
        return f"{self.done} of {self.total} cells measured; left: {left}"


def estimate(plan: RoundsPlan, found: RoundsFound) -> RoundsProgress:
    """What is left; for a cell that was not measured its own guess, corrected by the others'."""
    done = sum(min(plan.wanted(cell), found.rounds(cell.name)) for cell in plan.cells)
    total = sum(plan.wanted(cell) for cell in plan.cells)
    left = sum(
        max(0, plan.wanted(cell) - found.rounds(cell.name)) * _expected(cell, plan, found)
        for cell in plan.cells
    )
    return RoundsProgress(done, total, left, found.starts[-1] if found.starts else None)


def run_rounds(
    plan: RoundsPlan,
    say: Callable[[str], None],
    keep: Callable[[RoundsFound], object] = lambda _: None,
) -> RoundsFound:
    """Measure what is left, as long as there is time, and write it cell by cell.

    `keep` is called after each cell, by one process at a time. Cells that fail are said, and not
    tried again before the next run. Raises the error of an engine that cannot start; what was
    measured before is written.
    """
    found = plan.read()
    if other := differing(plan.path, plan.facts):
        say(f"{plan.path.name} was measured with another {', '.join(other)}: started over")
    say(str(estimate(plan, found)))
    left = list(_left(plan, found))
    if not left:
        return found
    began = time.monotonic()
    found.failures.clear()
    with _started(plan) as engines:
        found.starts.append(round(time.monotonic() - began, 1))
        say(f"engines are up, {found.starts[-1]:,.0f} s")
        warm = set[tuple[str, str]]()
        for number, cell in left:
            before = time.monotonic() - began
            late = plan.seconds and before + _expected(cell, plan, found) > plan.seconds
            if late or cell.name in found.failures:
                continue
            outcome = _try(cell, number, engines, warm, found)
            _save(plan, found, keep)
            say(f"{cell.name}, round {number}: {outcome}, {time.monotonic() - began:,.0f} s")
    say(str(estimate(plan, found)))
    return found


def _left(plan: RoundsPlan, found: RoundsFound) -> list[tuple[int, ServedCell]]:
    """Number of the round, from 1, and cell, in the order in which they are measured."""
    left = [
        (number, cell)
        for number in range(1, plan.rounds + 1)
        for cell in Random(number).sample(plan.cells, len(plan.cells))
        if found.rounds(cell.name) < number <= plan.wanted(cell)
    ]
    return sorted(left, key=lambda each: (each[0] > _FEW, each[1].rank, each[0]))


def _expected(cell: ServedCell, plan: RoundsPlan, found: RoundsFound) -> float:
    """Seconds that a round of a cell takes."""
    known = found.seconds.get(cell.name)
    if known:
        return max(known)
    spent = sum(sum(found.seconds.get(c.name, ())) for c in plan.cells)
    guessed = sum(c.seconds * found.rounds(c.name) for c in plan.cells)
    return cell.seconds * (spent / guessed if guessed else 1.0)


def _try(
    cell: ServedCell,
    number: int,
    engines: Mapping[str, Server],
    warm: set[tuple[str, str]],
    found: RoundsFound,
) -> str:
    """Measure a cell; how it went."""
    try:
        _warm_up(cell, engines, warm)
        started = time.monotonic()
        figures = _serve(cell, number, engines)
        found.note(cell.name, figures, time.monotonic() - started)
        for name, engine in engines.items():
            found.note_compiled(name, engine.call(_compiled))
    except PicBenchError as error:
        log = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        found.failures[cell.name] = f"{error}{log}"
        return f"failed, {error}"
    return "done"


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


def _compiled(engine: Engine) -> list[str]:
    return engine.compilations


def _watch(engine: Engine) -> None:
    engine.watch_compilations()


def _save(plan: RoundsPlan, found: RoundsFound, keep: Callable[[RoundsFound], object]) -> None:
    """Write what was found beside what other processes have measured meanwhile."""
    with locked(plan.path):
        found.adopt(plan.read(), {cell.name for cell in plan.cells})
        write_rounds(plan.path, found)
        keep(found)


@contextmanager
def _started(plan: RoundsPlan) -> Iterator[Mapping[str, Server]]:
    """The engines that the plan's cells use."""
    used = {arm.engine for cell in plan.cells for arm in cell.arms.values()}
    configs = {name: config for name, config in plan.engines.items() if name in used}
    with started_engines(configs) as (engines, _):
        for engine in engines.values():
            engine.call(_watch)
        yield engines


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRun:
    """Who serves, and for how many rounds and seconds (0: no limit)."""

    model: str
    device: str
    dtype: str
    rounds: int
    seconds: float
    output: Path
    commit: str | None = None

    def facts(self) -> dict[str, Any]:
        """What is measured, and on what."""
        found = provenance.facts(*provenance.ENGINE, device=self.device, commit=self.commit)
        return found | {"model": models.resolve(self.model).label, "dtype": self.dtype}


def measure_rounds(
    plan: RoundsPlan, write: Callable[[RoundsFound], str], say: Callable[[str], None]
) -> tuple[str, bool]:
    """Measure what is left: the page of all that is measured, and whether nothing is left.

    `write` writes the page after each cell, and returns it. It is empty before any is done.
    """

    def keep(found: RoundsFound) -> str:
        return write(found) if found.cells else ""

    found = run_rounds(plan, say, keep)
    return keep(found), plan.done(found)
