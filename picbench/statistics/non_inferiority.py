"""Is a loss small enough? "Not significantly different" is no answer to that.

Non-inferiority puts the burden of proof on the new measurement: its whole interval has to be above
the margin (CPMP, "Points to consider on switching between superiority and non-inferiority", 2000).

An interval from samples that all agree has no width. That none of n lost says only that few of all
do: with 95 % confidence a share of at most 1 - 0.05 ** (1 / n), about 3 / n (Hanley, Lippman-Hand,
"If Nothing Goes Wrong, Is Everything All Right?", JAMA 249, 1983).
"""

from enum import StrEnum
from math import ceil, log

from picbench.statistics.paired import Paired


class Loss(StrEnum):
    """What is known of a loss against a margin.

    `WITHIN`: below the margin with 95 % confidence. `BEYOND`: above it with 95 % confidence.
    `UNKNOWN`: neither.
    """

    WITHIN = "within"
    BEYOND = "beyond"
    UNKNOWN = "unknown"


def unseen_share(change: Paired) -> float | None:
    """The share of clusters that may lose although none of these changed; None where some did."""
    return None if change.higher or change.lower else 1 - 0.05 ** (1 / change.clusters)


def clusters_without_loss(margin: float) -> int:
    """How many clusters without a change rule out a loss of `margin`, between 0 and 1."""
    return ceil(log(0.05) / log(1 - margin))


def judge_loss(change: Paired, margin: float) -> Loss:
    """Whether a difference of scores from 0 to 1 is a loss of less than `margin`, if positive."""
    if margin <= 0:
        raise ValueError("a margin is positive")
    bounds, unseen = change.one_sided, unseen_share(change)
    if bounds is None or (unseen is not None and unseen >= margin):
        return Loss.UNKNOWN
    if bounds.low > -margin:
        return Loss.WITHIN
    return Loss.BEYOND if bounds.high < -margin else Loss.UNKNOWN
