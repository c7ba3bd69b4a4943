"""A claim at one place: a data set, or a point of an experiment."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Literal

import numpy as np

from picbench.statistics.bootstrap import Interval, MeanBootstrap
from picbench.statistics.clusters import sum_clusters
from picbench.statistics.student import FEW, StudentMean

Verdict = Literal["holds", "fails", "undecided"]

#: With what probability all intervals of a claim cover the truth.
CONFIDENCE = 0.95

#: Far ends of resamples are needed where a claim has many places.
RESAMPLES = 10_000

#: With fewer rows resampling makes intervals too narrow to decide anything.
FEWEST_ROWS = 20


@dataclass(frozen=True, slots=True)
class Bounds:
    """Where a quantity has to be."""

    least: float | None
    most: float | None

    def room(self, value: float) -> float:
        """The distance to the nearer bound; negative outside."""
        below = value - self.least if self.least is not None else float("inf")
        above = self.most - value if self.most is not None else float("inf")
        return min(below, above)

    def judge(self, found: Interval | None) -> Verdict:
        """Holds if all of the interval is inside, fails if all of it is on one side outside."""
        if found is None:
            return "undecided"
        low = float("-inf") if self.least is None else self.least
        high = float("inf") if self.most is None else self.most
        if low <= found.low and found.high <= high:
            return "holds"
        return "fails" if found.high < low or found.low > high else "undecided"


@dataclass(frozen=True, slots=True)
class JudgedCell:
    """The estimate at one place, its interval, and what that says; `samples` are rows or seeds."""

    on: str
    what: str
    value: float
    interval: Interval | None
    verdict: Verdict
    samples: int

    @property
    def same(self) -> bool:
        """Whether an interval of no width says that no sample differs."""
        return self.interval is not None and self.interval.low == self.interval.high


def level_of(cells: int) -> float:
    """The level of each of this many intervals (Bonferroni)."""
    return 1 - (1 - CONFIDENCE) / max(1, cells)


def unseen(first: Sequence[float], second: Sequence[float], level: float) -> float:
    """The share of rows that may differ although none of these does; 0 where some do.

    See `picbench.statistics.non_inferiority`; `level` is the probability that no more do.
    """
    if any(a != b for a, b in zip(first, second, strict=True)):
        return 0.0
    return float(1 - (1 - level) ** (1 / len(first)))


def seed_interval(
    values: Sequence[float], level: float, *, logs: bool
) -> tuple[float, Interval | None]:
    """Mean and interval over seeds; of logarithms, and given back as ratios, if `logs`."""
    found = sum_clusters(np.asarray(values, dtype=np.float64), None)
    mean = StudentMean.of(found) if len(values) <= FEW else MeanBootstrap(found)
    interval = mean.interval(level)
    if not logs:
        return found.mean, interval
    if interval is not None:
        interval = Interval(exp(interval.low), exp(interval.high), level)
    return exp(found.mean), interval


def log_ratio(first: float, second: float) -> float | None:
    """None where one of the two is not positive."""
    return log(first / second) if first > 0 and second > 0 else None
