"""What the runs of an experiment measured, read back from their directories."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from picbench.output.run_reader import Run
from picbench.output.summary import ArmSummary
from picbench.papers.paper_settings import Point
from picbench.papers.report_table import MeanCell
from picbench.workloads.traffic.traffic_facts import TrafficFacts


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A complete run of a point, and the facts about its requests."""

    point: Point
    facts: TrafficFacts
    data: Run

    def arm(self, name: str) -> ArmSummary:
        """What an arm did."""
        return self.data.summary[name]

    def peak(self, arm: str) -> float:
        """Most blocks that running requests of an arm held at a time."""
        return self.arm(arm).blocks.peak_referenced

    def share(self, arm: str, occupancy: str) -> float:
        """A field of the arm's `Occupancy`, in percent of the pool."""
        blocks = self.arm(arm).blocks
        return 100.0 * float(getattr(blocks, occupancy)) / blocks.pool


@dataclass(frozen=True, slots=True)
class SeedSpread:
    """Mean and sample standard deviation over runs; no deviation of a single one."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "SeedSpread":
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

    def cell(self, digits: int = 2) -> MeanCell | None:
        """A cell of a table; None of nothing."""
        return None if self.mean is None else MeanCell(self.mean, self.deviation, digits)


def by_label(runs: Iterable[MeasuredRun]) -> dict[str, list[MeasuredRun]]:
    """Runs of the same workload under different seeds, in the order of the settings."""
    found: dict[str, list[MeasuredRun]] = {}
    for run in runs:
        found.setdefault(run.point.label, []).append(run)
    return found


def arms_of(runs: Sequence[MeasuredRun]) -> list[str]:
    """The arms, in the order of the settings."""
    return list(runs[0].data.summary)
