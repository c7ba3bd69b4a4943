"""How many samples would decide a question that so many left open."""

from math import ceil

from scipy import stats  # type: ignore[import-untyped]

from picbench.statistics.non_inferiority import unseen_parts
from picbench.statistics.paired import Paired


def samples_to_decide(
    change: Paired, distance: float, confidence: float = 0.95, power: float = 0.8
) -> int | None:
    """Samples with which a one-sided bound of `confidence` clears `distance`, `power` of the time.

    `distance` is from the true change to the value in question, as a difference or as a logarithm
    of ratios. Samples are taken to vary as the measured ones do. None where these did not vary.
    """
    if not distance:
        raise ValueError("no number of samples decides about a distance of 0")
    if not change.standard_error:
        return None
    reach = float(stats.norm.ppf(confidence) + stats.norm.ppf(power))
    return ceil(change.pairs * (reach * change.standard_error / distance) ** 2)


def samples_to_judge(change: Paired, margin: float) -> int | None:
    """Samples with which `judge_loss` would say that a loss is within `margin`, or beyond it.

    As `samples_to_decide`, for a score whose true change is the measured one, with what bounds
    allow for unseen losses. None where samples did not vary, or the loss is exactly the margin.
    """
    distance = change.value + margin
    needed = samples_to_decide(change, distance) if distance else None
    while needed is not None:
        lost, won = unseen_parts(change, needed * change.clusters / change.pairs)
        left = abs(distance) - (lost if distance > 0 else won)
        enough = samples_to_decide(change, left) if left > 0 else None
        if enough is not None and enough <= needed:
            break
        needed = max(enough or 0, ceil(1.02 * needed) + 1)
    return needed


def samples_for_width(change: Paired, half_width: float, level: float = 0.95) -> int | None:
    """Samples whose interval reaches `half_width` to either side; None where these did not vary."""
    if not change.standard_error:
        return None
    reach = float(stats.norm.isf((1 - level) / 2))
    return ceil(change.pairs * (reach * change.standard_error / half_width) ** 2)
