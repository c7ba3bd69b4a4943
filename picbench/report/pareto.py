"""Which arms are worth choosing: those that no other beats in both time and score."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

from picbench.statistics.bootstrap import Interval


@dataclass(frozen=True, slots=True)
class ArmPoint:
    """An arm: its time (positive, less is better) and its score (more is better)."""

    arm: str
    time: float
    score: float
    time_interval: Interval | None = None
    score_interval: Interval | None = None


def frontier(points: Sequence[ArmPoint]) -> list[ArmPoint]:
    """The points that no other dominates, the fastest first.

    A point dominates another if it is as good in both and better in one; equal points stay both.
    """
    kept = [p for p in points if not any(_dominates(other, p) for other in points)]
    return sorted(kept, key=lambda point: (point.time, point.score))


def knee(points: Sequence[ArmPoint]) -> ArmPoint | None:
    """The point of a frontier that is farthest above the line between its ends.

    After Satopaa et al., "Finding a Kneedle in a Haystack" (2011), with logarithms of times, since
    times are compared as ratios. None where no point is above the line, or none is between.
    """
    if len(points) < 3:
        return None
    first, last = points[0], points[-1]
    span, rise = log(last.time / first.time), last.score - first.score
    if span <= 0 or rise <= 0:
        return None

    def above(point: ArmPoint) -> float:
        return (point.score - first.score) / rise - log(point.time / first.time) / span

    best = max(points[1:-1], key=above)
    return best if above(best) > 0 else None


def _dominates(one: ArmPoint, other: ArmPoint) -> bool:
    as_good = one.time <= other.time and one.score >= other.score
    return as_good and (one.time < other.time or one.score > other.score)
