"""How many samples would decide a question that so many left open."""

from math import ceil

from scipy import stats  # type: ignore[import-untyped]

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


def samples_for_width(change: Paired, half_width: float, level: float = 0.95) -> int | None:
    """Samples whose interval reaches `half_width` to either side; None where these did not vary."""
    if not change.standard_error:
        return None
    reach = float(stats.norm.isf((1 - level) / 2))
    return ceil(change.pairs * (reach * change.standard_error / half_width) ** 2)
