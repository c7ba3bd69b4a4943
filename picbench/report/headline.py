"""The verdict on a run: one sentence, and whether it is good news."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from picbench.comparison.arm_comparison import SCORE, SCORE_OF_ALL, ArmComparison, MetricChange
from picbench.comparison.comparison_rows import drift_words
from picbench.output.summary import BASELINE
from picbench.output.verdict import subject_of
from picbench.report.html_table import ratio_ends
from picbench.report.losses import unseen_loss
from picbench.report.run_contents import RunContents
from picbench.statistics.non_inferiority import Loss

#: How the page colours a verdict.
Tone = Literal["good", "bad", "open"]

_TONES: dict[Loss, Tone] = {Loss.WITHIN: "good", Loss.BEYOND: "bad"}


@dataclass(frozen=True, slots=True)
class Headline:
    """The verdict in words; `detail` is what it means for the margin that was asked for."""

    text: str
    detail: str
    tone: Tone


def headline(contents: RunContents) -> Headline:
    """What the run's main arm gains and loses against full, or why that cannot be said."""
    status = contents.manifest["status"]
    if status == "invalid":
        return Headline("Invalid run", f"{contents.manifest['reason'] or 'no reason given'}", "bad")
    comparison, name = contents.comparison, subject_of(contents.reusing())
    found = comparison.arms if comparison is not None else ()
    arm = next((arm for arm in found if arm.after == name), None)
    if comparison is None or arm is None:
        detail = contents.notes[0] if contents.notes else f"no arm reuses chunks beside {BASELINE}"
        return Headline("No comparison", detail, "open")
    text = f"{arm.after} against {BASELINE}: {', '.join(_parts(contents, arm))}"
    margin = comparison.settings.margin
    score = _score(arm)
    if not contents.meaningful or score is None or margin is None:
        return Headline(f"{text} (n={arm.pairs})", "Scores mean nothing here.", "open")
    loss, unseen = score.loss or Loss.UNKNOWN, unseen_loss(score)
    detail = {
        Loss.WITHIN: f"It loses less than {margin:g}, with 95 % confidence.",
        Loss.BEYOND: f"It loses more than {margin:g}, with 95 % confidence.",
        Loss.UNKNOWN: f"Whether it loses more than {margin:g} is open"
        + (f": about {score.needed:,} samples would decide." if score.needed else "."),
    }[loss]
    if score.before == 0:
        detail = f"{BASELINE} scores 0 on all of them, so there is no score to lose."
        return Headline(f"{text} (n={arm.pairs})", detail, "open")
    if unseen is not None:
        detail = f"No score differs, but a loss in {unseen:.0%} of samples may go unseen."
    return Headline(f"{text} (n={arm.pairs})", detail, _TONES.get(loss, "open"))


def _parts(contents: RunContents, arm: ArmComparison) -> Iterator[str]:
    ttft, score = arm.metric("ttft_ms"), _score(arm)
    if ttft is not None:
        found = ttft.change.interval
        ends = "" if found is None else f" ({ratio_ends(found)}{drift_words(ttft)})"
        yield f"first token in {ttft.change.value:.2f}x the time{ends}"
    peaks = arm.counter("peak_blocks")
    if peaks is not None and peaks.before:
        yield f"{peaks.after / peaks.before:.2f}x the blocks at peak"
    if score is not None and contents.meaningful:
        found = score.change.interval
        ends = "" if found is None else f" ({found.low:+.2f} to {found.high:+.2f})"
        yield f"{contents.metric} {score.change.value:+.2f}{ends}"


def _score(arm: ArmComparison) -> MetricChange | None:
    """Over all samples where some replies are unparsed: leaving these out flatters an arm."""
    return arm.metric(SCORE_OF_ALL) or arm.metric(SCORE)
