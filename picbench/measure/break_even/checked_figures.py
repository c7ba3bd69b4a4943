"""Figures that were predicted, beside what was measured, and the page of them."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from math import inf
from pathlib import Path
from statistics import median

from picbench.grid.measured_grid import GridFacts
from picbench.measure.break_even.checked_repeats import CheckedRepeats
from picbench.output import markdown
from picbench.output.json_file import write_json
from picbench.profile.prediction.graph_sizes import graph_warning
from picbench.profile.prediction.predictor import GridPredictor
from picbench.whole_files import write_whole

#: Errors up to this share are what is promised.
WITHIN = 0.15

_HEAD = (
    "trace",
    "arm",
    "figure",
    "measured",
    "predicted",
    "error",
    "spread",
    "error at the grid's speed",
    "predicted range",
    "verdict",
    "in the grid's range",
)


class CheckVerdict(StrEnum):
    """Whether a prediction is as good as promised."""

    HOLDS = "holds"
    AT_SPEED = "at the grid's speed"
    FAILS = "fails"


@dataclass(frozen=True, slots=True)
class CheckedFigure:
    """A figure of an arm on a trace: measured in each repeat, and what was predicted of it.

    `slowness` is how many times as long the machine took in each repeat for points of the grid as
    the grid says; times and rates at the grid's speed have it divided out. `within` is the range
    that was predicted of single measurements. Counts have neither.
    """

    trace: str
    arm: str
    figure: str
    measured: list[float] = field(repr=False)
    predicted: float
    inside: bool
    slowness: list[float] = field(default_factory=list, repr=False)
    rate: bool = False
    within: tuple[float, float] | None = None

    @property
    def in_range(self) -> bool:
        """Whether the median of what was measured is within the predicted range."""
        low, high = self.within or (-inf, inf)
        return low <= median(self.measured) <= high

    @property
    def error(self) -> float:
        """Relative, to the median of what was measured."""
        return self.predicted / median(self.measured) - 1

    @property
    def at_speed(self) -> list[float]:
        """What was measured, at the grid's speed."""
        if not self.slowness:
            return self.measured
        each = zip(self.measured, self.slowness, strict=True)
        return [value * slow if self.rate else value / slow for value, slow in each]

    @property
    def error_at_speed(self) -> float:
        """Relative, to the median of what was measured at the grid's speed."""
        return self.predicted / median(self.at_speed) - 1

    @property
    def verdict(self) -> CheckVerdict:
        """By the errors."""
        if abs(self.error) <= WITHIN:
            return CheckVerdict.HOLDS
        return CheckVerdict.AT_SPEED if abs(self.error_at_speed) <= WITHIN else CheckVerdict.FAILS


def summarise_figures(found: Sequence[CheckedFigure]) -> str:
    """How many predictions hold, figure by figure."""
    texts = []
    for figure in dict.fromkeys(one.figure for one in found):
        own = [one for one in found if one.figure == figure]
        errors = [abs(one.error) for one in own]
        good = sum(error <= WITHIN for error in errors)
        text = f"{figure}: {good} of {len(errors)} within {WITHIN:.0%}"
        if own[0].slowness:
            again = sum(abs(one.error_at_speed) <= WITHIN for one in own)
            text += f" ({again} at the grid's speed)"
        if own[0].within:
            text += f", {sum(one.in_range for one in own)} in the predicted range"
        texts.append(f"{text}, median error {median(errors):.0%}, worst {max(errors):.0%}")
    return "; ".join(texts)


def graph_warnings(facts: GridFacts, predictor: GridPredictor) -> list[str]:
    """What to know where the engines of `facts`, or a calibration's, had other CUDA graphs."""
    here = graph_warning(facts, predictor.grid.facts, "these engines")
    return [warning for warning in (predictor.warning, here) if warning]


def write_figures(
    output: Path,
    done: CheckedRepeats,
    predictor: GridPredictor,
    found: Sequence[CheckedFigure],
    quiet: float | None = None,
) -> None:
    """Write ``profile.json`` and ``profile.md``.

    `quiet` is the share of the requests alone that began on a core that nothing else used.
    """
    grid, calibration, facts = predictor.grid, predictor.calibration, done.facts
    at_speed = f"At the speed of: {calibration.about()} " if calibration else ""
    page = [
        "# What `picbench profile` predicts, against engines",
        f"Three traces that the grid has no point of, drawn with seed {done.seed}, served by "
        f"{facts.model}, {facts.dtype}, {facts.hardware}, commit {facts.versions['commit'][:7]}. "
        f"{facts.caveat and facts.caveat.rstrip('.') + '. '}"
        f"Median (lowest - highest) of {len(done.repeats)} repeats, arms in a new order in each; "
        f"spread is highest over lowest. Predicted from: {grid.about()} {at_speed}TTFT: median of "
        "requests alone, from an empty cache; "
        f"requests a second and KV: {grid.facts.running} at a time.{_quiet(quiet)}",
        "Between them each arm served points of the grid again that compute about as much: how "
        f"much longer they took than the {'calibrated ' if calibration else ''}grid says, in the "
        "median over the arms that map chunks "
        "and over the others, is how slow the machine was for them in that repeat "
        f"({_slowness(found)}). `at the grid's speed` has that divided out.",
        *graph_warnings(facts, predictor),
        f"{summarise_figures(found)}.",
        markdown.table(_HEAD, [_row(one) for one in found]),
    ]
    output.mkdir(parents=True, exist_ok=True)
    write_whole(output / "profile.md", ("\n\n".join(page) + "\n").encode())
    document = {
        "facts": asdict(facts),
        "grid": asdict(grid.facts),
        "calibration": asdict(calibration.facts) if calibration else None,
        "found": [asdict(one) for one in found],
    }
    write_json(output / "profile.json", document)


def _quiet(share: float | None) -> str:
    if share is None:
        return ""
    return f" {share:.0%} of the requests alone began on a core that nothing else used."


def _row(one: CheckedFigure) -> tuple[str, ...]:
    return (
        one.trace,
        one.arm,
        one.figure,
        f"{median(one.measured):.4g} ({min(one.measured):.4g} - {max(one.measured):.4g})",
        f"{one.predicted:.4g}",
        f"{one.error:+.0%}",
        f"{max(one.measured) / min(one.measured):.2f}",
        f"{one.error_at_speed:+.0%}" if one.slowness else "-",
        f"{one.within[0]:.4g} - {one.within[1]:.4g}" if one.within else "-",
        one.verdict,
        "yes" if one.inside else "no",
    )


def _slowness(found: Sequence[CheckedFigure]) -> str:
    return ", ".join(_ranges(found))


def _ranges(found: Sequence[CheckedFigure]) -> Iterator[str]:
    """The machine's slowness, trace by trace and figure by figure, over arms of both kinds."""
    for trace in dict.fromkeys(one.trace for one in found):
        for figure in dict.fromkeys(one.figure for one in found if one.slowness):
            slow = [
                s for one in found if (one.trace, one.figure) == (trace, figure)
                for s in one.slowness
            ]  # fmt: skip
            yield f"{trace}, {figure}: {median(slow):.2f} ({min(slow):.2f} - {max(slow):.2f})"
