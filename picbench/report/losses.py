"""What is said of a loss of score, also where no sample lost anything."""

from picbench.comparison.arm_comparison import MetricChange
from picbench.statistics.non_inferiority import Loss, loss_bounds, unseen_share


def drop_at_most(metric: MetricChange) -> float | None:
    """The bound of the loss of a score from 0 to 1, with 95 % confidence; None of a single set."""
    unseen, bounds = unseen_share(metric.change), loss_bounds(metric.change)
    if unseen is not None:
        return unseen
    return None if bounds is None else max(0.0, -bounds.low)


def unseen_loss(metric: MetricChange) -> float | None:
    """The share of samples whose loss may have gone unseen, where that leaves the loss open."""
    return unseen_share(metric.change) if metric.loss is Loss.UNKNOWN else None
