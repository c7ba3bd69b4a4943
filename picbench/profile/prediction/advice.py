"""Is PIC worth it for this trace? One line, and why."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from picbench.engines.algorithms import Reuse
from picbench.profile.prediction.predictor import ArmPrediction
from picbench.profile.trace_profile import ArmProfile, TraceProfile

#: Differences up to this share of the better figure decide nothing.
MARGIN = 0.10

#: The lower bound of work and of accuracy: it is shown, and not advised.
_BOUND = "naive"


class Worth(StrEnum):
    """What to do."""

    YES = "yes"
    NO = "no"
    EQUAL = "no difference"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Advice:
    """Whether PIC is worth it, the arm to take, and one line that says so."""

    worth: Worth
    arm: str | None
    line: str


def advise(profile: TraceProfile, predicted: Mapping[str, ArmPrediction]) -> Advice:
    """Compare the best arm with chunks with the best one without.

    `predicted` has an entry for each arm, or none where there is no grid; then computed tokens are
    compared. Outside of the grid times decide nothing that computed tokens do not say as well.
    Accuracy is not part of it.
    """
    linked = [a for a in profile.arms if a.algorithm.reuse is Reuse.CHUNKS and _offered(a)]
    plain = [a for a in profile.arms if a.algorithm.reuse is not Reuse.CHUNKS]
    if not linked or not plain:
        return Advice(Worth.UNKNOWN, None, "unknown: an arm with chunks and one without are needed")
    ours = _best(linked, predicted)
    theirs = min(plain, key=lambda arm: _cost(arm, predicted))
    worst = max(linked + plain, key=lambda arm: arm.counted.refused)
    if worst.counted.refused:
        line = (
            f"unknown: a pool of {profile.pool:,} blocks is too small for "
            f"{worst.counted.refused:,} of {profile.traffic.requests:,} requests under "
            f"{worst.algorithm.spec} (raise --pool)"
        )
        return Advice(Worth.UNKNOWN, None, line)
    ratio = _ratio(ours, theirs, predicted)
    figure = "seconds of the engine a request" if predicted else "computed tokens"
    worth = _verdict(ratio)
    named = (ours.algorithm.spec, theirs.algorithm.spec)
    if any(not predicted[name].inside for name in named if name in predicted):
        tokens = _ratio(ours, theirs, {})
        figure += f" (extrapolated, outside of the measured grid) and {tokens:.2f} of its tokens"
        worth = worth if _verdict(tokens) is worth else Worth.UNKNOWN
    arm = {Worth.YES: named[0], Worth.UNKNOWN: None}.get(worth, named[1])
    line = (
        f"{_word(worth, *named)}. {named[0]} takes {ratio:.2f} of {named[1]}'s {figure}; "
        f"{_why(profile, ours, theirs)}."
    )
    return Advice(worth, arm, line)


def _ratio(ours: ArmProfile, theirs: ArmProfile, predicted: Mapping[str, ArmPrediction]) -> float:
    return _cost(ours, predicted) / max(_cost(theirs, predicted), 1e-12)


def _verdict(ratio: float) -> Worth:
    if ratio < 1 - MARGIN:
        return Worth.YES
    return Worth.NO if ratio > 1 + MARGIN else Worth.EQUAL


def _word(worth: Worth, ours: str, theirs: str) -> str:
    words = {
        Worth.YES: f"PIC is worth it: {ours}",
        Worth.NO: f"PIC is not worth it, it loses: stay with {theirs}",
        Worth.EQUAL: f"PIC makes no difference: stay with {theirs}",
        Worth.UNKNOWN: "unknown, measure it",
    }
    return words[worth]


def _best(arms: Sequence[ArmProfile], predicted: Mapping[str, ArmPrediction]) -> ArmProfile:
    """The arm of the least cost; mepic, where it is as good as that."""
    least = min(_cost(arm, predicted) for arm in arms)
    good = [arm for arm in arms if _cost(arm, predicted) <= least * (1 + MARGIN)]
    return min(good, key=lambda arm: (arm.algorithm.name != "mepic", _cost(arm, predicted)))


def _offered(arm: ArmProfile) -> bool:
    # Private copies are counted from a tier that never forgets, which no pool pays for.
    return arm.algorithm.name != _BOUND and not getattr(arm.algorithm, "private", False)


def _cost(arm: ArmProfile, predicted: Mapping[str, ArmPrediction]) -> float:
    found = predicted.get(arm.algorithm.spec)
    if found is not None and found.requests_s:
        return 1 / found.requests_s
    return arm.counted.computed / max(1, arm.counted.requests)


def _why(profile: TraceProfile, ours: ArmProfile, theirs: ArmProfile) -> str:
    traffic = profile.traffic
    chunks = traffic.chunks / traffic.requests
    if not traffic.chunks:
        return "the trace has no chunks"
    reasons = [
        f"{traffic.repeated:z.0%} of chunk tokens recur",
        f"{ours.counted.saved:z.0%} of prompt tokens are saved against {theirs.counted.saved:z.0%}",
        f"prompts have {traffic.prompt / traffic.requests:,.0f} tokens in {chunks:.1f} chunks",
    ]
    if ours.limited and ours.limited.saved < ours.unbounded.saved - 0.05:
        reasons.append(f"the pool costs {ours.unbounded.saved - ours.limited.saved:.0%} of them")
    return ", ".join(reasons)
