"""Times of an arm as ratios to those of `full` on the same requests.

Arms take turns within a run, so what slows a whole run down cancels: between two runs of the same
code on a busy machine TTFT was 1.6 times as long in milliseconds, 1.05 times relative to `full`.
"""

from collections.abc import Mapping
from dataclasses import replace

from picbench.comparison.measured_arm import MeasuredArm
from picbench.output.summary import BASELINE

#: Relative times, and the milliseconds that they are made from.
RELATIVE = {"ttft_vs_full": "ttft_ms", "tpot_vs_full": "tpot_ms"}


def with_relative_times(arms: Mapping[str, MeasuredArm]) -> dict[str, MeasuredArm]:
    """The arms with columns of relative times, where `full` is one of them."""
    if BASELINE not in arms:
        return dict(arms)
    full = arms[BASELINE]
    return {
        name: arm if name == BASELINE else replace(arm, times={**arm.times, **_relative(arm, full)})
        for name, arm in arms.items()
    }


def _relative(arm: MeasuredArm, full: MeasuredArm) -> dict[str, tuple[float | None, ...]]:
    return {name: _over(arm, full, time) for name, time in RELATIVE.items()}


def _over(arm: MeasuredArm, full: MeasuredArm, time: str) -> tuple[float | None, ...]:
    base = dict(zip(full.samples, full.times[time], strict=True))
    pairs = zip(arm.samples, arm.times[time], strict=True)
    known = [(value, base.get(sample)) for sample, value in pairs]
    return tuple(value / other if value and other else None for value, other in known)
