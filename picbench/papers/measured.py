"""What the runs of an experiment measured, read back from their directories."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from picbench.output.ledger_series import Series, read_series
from picbench.output.run_directory import MANIFEST, MEMORY, SUMMARY
from picbench.papers.paper_settings import Point
from picbench.papers.runs import Planned
from picbench.workloads.traffic.traffic_facts import TrafficFacts


@dataclass(frozen=True, slots=True)
class Measured:
    """One run: its point, the facts about its requests, summary and ledger by arm, manifest."""

    point: Point
    facts: TrafficFacts
    arms: Mapping[str, Mapping[str, Any]]
    series: Mapping[str, Series]
    manifest: Mapping[str, Any]

    def peak(self, arm: str) -> float:
        """Most blocks that running requests of an arm held at a time."""
        return float(self.arms[arm]["blocks"]["peak_referenced"])

    def share(self, arm: str, occupancy: str) -> float:
        """A field of the arm's `Occupancy`, in percent of the pool."""
        blocks = self.arms[arm]["blocks"]
        return 100.0 * float(blocks[occupancy]) / float(blocks["pool"])


def read_run(planned: Planned) -> Measured:
    """Read the run of a point, which must be complete."""
    path = planned.directory
    return Measured(
        planned.point,
        planned.facts,
        _json(path / SUMMARY)["arms"],
        read_series(path / MEMORY),
        _json(path / MANIFEST),
    )


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and sample standard deviation over runs; no deviation of a single one."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Spread":
        """The spread of the values that are there."""
        return cls(tuple(value for value in values if value is not None))

    @property
    def mean(self) -> float | None:
        """The mean; None of nothing."""
        return float(np.mean(self.values)) if self.values else None

    @property
    def deviation(self) -> float | None:
        """The deviation; None below two values."""
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else None

    def text(self, digits: int = 2) -> str:
        """``mean ± deviation``."""
        if self.mean is None:
            return "-"
        text = f"{self.mean:,.{digits}f}"
        return text if self.deviation is None else f"{text} ± {self.deviation:,.{digits}f}"


def by_label(runs: Iterable[Measured]) -> dict[str, list[Measured]]:
    """Runs of the same workload under different seeds, in the order of the settings."""
    found: dict[str, list[Measured]] = {}
    for run in runs:
        found.setdefault(run.point.label, []).append(run)
    return found


def arms_of(runs: Sequence[Measured]) -> list[str]:
    """The arms, in the order of the settings."""
    return list(runs[0].arms)


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found
