"""What a run's user gains and loses by reusing chunks, in one line."""

from collections.abc import Iterator, Mapping, Sequence

from picbench.output.summary import BASELINE, ArmSummary

#: The algorithm that the line is about, where a run has it, and the arm that recomputes nothing
#: in the chunks that it reuses.
_PREFERRED, _UNREPAIRED = "mepic", "naive"


def verdict(arms: Mapping[str, ArmSummary], reusing: Sequence[str]) -> Iterator[str]:
    """Compare one arm with `full`; nothing where there is nothing to compare.

    The arm is MEPIC's, or else the last of `reusing`, the arms that reuse chunks. Times are paired
    (see `Ratio`), scores are differences of means: of meaningful ones, over the same requests.
    """
    full, name = arms.get(BASELINE), subject_of([name for name in reusing if name in arms])
    if full is None or name is None:
        return
    arm = arms[name]
    if arm.ttft_vs_full is None:
        return
    parts = [f"first token in {arm.ttft_vs_full.geomean:.2f}x the time"]
    if full.blocks.peak_referenced:
        blocks = arm.blocks.peak_referenced / full.blocks.peak_referenced
        parts.append(f"{blocks:.2f}x the blocks at peak")
    lost = _difference(arm, full)
    if lost is not None:
        parts.append(f"{arm.score.metric} {lost}{_of_naive(arms, name, full)}")
    yield f"{name} against {BASELINE}: {', '.join(parts)} (n={arm.ttft_vs_full.pairs})"


def subject_of(reusing: Sequence[str]) -> str | None:
    """The arm that a line about reuse is about: MEPIC's, or else the last; None of none."""
    preferred = [name for name in reusing if name.partition(":")[0] == _PREFERRED]
    return next(iter(preferred or reversed(reusing)), None)


def _of_naive(arms: Mapping[str, ArmSummary], subject: str, full: ArmSummary) -> str:
    """What reuse without recomputation loses, beside what the subject loses."""
    lost = _difference(arms[_UNREPAIRED], full) if _UNREPAIRED in arms else None
    return f" ({_UNREPAIRED} {lost})" if lost is not None and subject != _UNREPAIRED else ""


def _difference(arm: ArmSummary, full: ArmSummary) -> str | None:
    """The difference of mean scores, signed; None where means are of different requests."""
    if arm.score.mean is None or full.score.mean is None or not arm.score.meaningful:
        return None
    if arm.failed or full.failed:
        return None
    return f"{round(arm.score.mean - full.score.mean, 2) + 0.0:+.2f}"
