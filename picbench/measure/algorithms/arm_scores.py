"""What the rows of a part come to: each arm's score beside full recompute's, and what it links."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from picbench.errors import DataError
from picbench.measure.algorithms.arm_sets import FULL, MEPIC, OWN
from picbench.measure.algorithms.row_intervals import RowInterval, difference_of, ratio_of
from picbench.measure.algorithms.scored_part import Case, ScoredPart

#: Share of full recompute's score that an arm of the frontier keeps on every data set.
KEPT = 0.97


@dataclass(frozen=True, slots=True)
class ArmScore:
    """An arm on a case: means over `rows`.

    `difference` is the score less that of full recompute on the same rows and the same model,
    `kept` the ratio of the two. `linked` and `computed` are tokens a request, `share` is `linked`
    over the tokens of chunks.
    """

    case: Case
    arm: str
    rows: int
    score: float
    difference: RowInterval
    kept: RowInterval
    linked: float
    share: float
    computed: float


def score_arms(part: ScoredPart) -> dict[str, ArmScore]:
    """All arms of a part, by spec.

    Raises DataError for a single row, and where full recompute scores nothing, or might have in
    other rows (a resample in which it does).
    """
    full = part.arms[FULL].score
    if part.rows < 2 or not any(full) or ratio_of(full, full) is None:
        raise DataError(
            f"{part.case.name}: {part.rows} rows of which full recompute answers none or few: "
            "nothing to compare with",
            hint="measure more `rows`",
        )
    chunk = fmean(part.chunk)
    return {
        arm: ArmScore(
            part.case,
            arm,
            part.rows,
            fmean(rows.score),
            difference_of(rows.score, full),
            _ratio(rows.score, full),
            fmean(rows.linked),
            fmean(rows.linked) / chunk,
            fmean(rows.computed),
        )
        for arm, rows in part.arms.items()
    }


def _ratio(score: Sequence[float], full: Sequence[float]) -> RowInterval:
    found = ratio_of(score, full)
    assert found is not None  # The same resamples of `full` can be divided by.
    return found


@dataclass(frozen=True, slots=True)
class FrontierArm:
    """An arm of ours on all data sets: the least it keeps, and where it links more than MEPIC."""

    arm: str
    worst: ArmScore
    costlier: tuple[str, ...]
    below: tuple[str, ...]
    surely_above: int
    datasets: int

    @property
    def reached(self) -> bool:
        """Whether it keeps enough on every data set and links no more than MEPIC on any."""
        return not self.costlier and not self.below


def frontier(scores: Mapping[str, Mapping[str, ArmScore]]) -> list[FrontierArm]:
    """Our arms, best first, by the scores of a model: data set, then arm."""
    own = [arm for arm in next(iter(scores.values())) if arm in OWN]
    found = [_frontier_arm(arm, scores) for arm in own]
    return sorted(found, key=lambda arm: (not arm.reached, -arm.worst.kept.value))


def _frontier_arm(arm: str, scores: Mapping[str, Mapping[str, ArmScore]]) -> FrontierArm:
    on: Sequence[ArmScore] = [arms[arm] for arms in scores.values()]
    return FrontierArm(
        arm,
        min(on, key=lambda score: score.kept.value),
        tuple(s.case.dataset for s in on if s.linked > scores[s.case.dataset][MEPIC].linked),
        tuple(s.case.dataset for s in on if s.kept.value < KEPT),
        sum(s.kept.low >= KEPT for s in on),
        len(on),
    )
