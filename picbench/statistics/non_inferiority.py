"""Is a loss small enough? "Not significantly different" is no answer to that.

Non-inferiority puts the burden of proof on the new measurement: its whole interval has to be above
the margin (CPMP, "Points to consider on switching between superiority and non-inferiority", 2000).

An interval knows only what it was made from. That none of n lost says no more than that few of all
do: with 95 % confidence a share of at most 1 - 0.05 ** (1 / n), about 3 / n (Hanley, Lippman-Hand,
"If Nothing Goes Wrong, Is Everything All Right?", JAMA 249, 1983). Neither do samples that won
change that, nor samples that lost a little: so bounds allow for such a share that changes by more
than any that was seen.
"""

from enum import StrEnum
from math import ceil, log

from picbench.statistics.bootstrap import Interval
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
    return None if change.higher or change.lower else _unseen(change)


def loss_bounds(change: Paired) -> Interval | None:
    """Bounds, of 95 % confidence each, of a mean difference of scores from 0 to 1.

    The share of clusters that may lose more than any did counts as lost in full, as far as that is
    more; and so for those that may win more. Scores of which one was lost and one won in full have
    the bounds of their mean. None for a single cluster.
    """
    if change.one_sided is None:
        return None
    low, high = change.one_sided.low, change.one_sided.high
    lost, won = unseen_parts(change, change.clusters)
    return Interval(
        (1 - lost) * low - lost,
        (1 - won) * high + won,
        change.one_sided.level,
    )


def unseen_parts(change: Paired, clusters: float) -> tuple[float, float]:
    """How much of a mean score may be lost, and won, by what none of so many clusters shows."""
    share = _share(clusters)
    return share * (1 - max(0.0, -change.least)), share * (1 - max(0.0, change.most))


def clusters_without_loss(margin: float) -> int:
    """How many clusters without a loss rule out one of `margin`, above 0 and up to 1."""
    return ceil(log(0.05) / log(1 - margin)) if margin < 1 else 1


def judge_loss(change: Paired, margin: float) -> Loss:
    """Whether a difference of scores from 0 to 1 is a loss of less than `margin`, if positive."""
    if margin <= 0:
        raise ValueError("a margin is positive")
    bounds = loss_bounds(change)
    if bounds is None:
        return Loss.UNKNOWN
    if bounds.low > -margin:
        return Loss.WITHIN
    return Loss.BEYOND if bounds.high < -margin else Loss.UNKNOWN


def _unseen(change: Paired) -> float:
    """The share of clusters that may do what none of these did."""
    return _share(change.clusters)


def _share(clusters: float) -> float:
    return float(1 - 0.05 ** (1 / clusters))
