"""What rounds of measurements have found, in a file that several processes may add to."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from picbench.output.json_file import write_json

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
