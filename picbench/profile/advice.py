"""Is PIC worth it for this trace? One line, and why."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from math import isinf
from typing import Any

from picbench.profile.grid import links_chunks
from picbench.profile.predictor import ArmPrediction, GridPredictor, PredictorErrors
from picbench.profile.profile import ArmProfile, TraceProfile
from picbench.tables.table import NOTHING, Column, Table

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
    plain = [arm for arm in profile.arms if not links_chunks(arm.algorithm)]
    # Private copies are counted from a tier that never forgets, which no pool pays for.
    linked = [
        arm
        for arm in profile.arms
        if links_chunks(arm.algorithm)
        and arm.algorithm.name != _BOUND
        and not getattr(arm.algorithm, "private", False)
    ]
    if not linked or not plain:
        return Advice(Worth.UNKNOWN, None, "unknown: an arm with chunks and one without are needed")
    least = min(_cost(arm, predicted) for arm in linked)
    good = [arm for arm in linked if _cost(arm, predicted) <= least * (1 + MARGIN)]
    ours = min(good, key=lambda arm: (arm.algorithm.name != "mepic", _cost(arm, predicted)))
    theirs = min(plain, key=lambda arm: _cost(arm, predicted))
    worst = max(linked + plain, key=lambda arm: arm.counted.refused)
    if worst.counted.refused:
        line = (
            f"unknown: a pool of {profile.pool:,} blocks is too small for "
            f"{worst.counted.refused:,} of {profile.traffic.requests:,} requests under "
            f"{worst.algorithm.spec} (raise --pool)"
        )
        return Advice(Worth.UNKNOWN, None, line)
    mine, other = ours.algorithm.spec, theirs.algorithm.spec
    ratio = _ratio(ours, theirs, predicted)
    figure = "seconds of the engine a request" if predicted else "computed tokens"
    worth = _verdict(ratio)
    if any(not predicted[name].inside for name in (mine, other) if name in predicted):
        tokens = _ratio(ours, theirs, {})
        figure += f" (extrapolated, outside of the measured grid) and {tokens:.2f} of its tokens"
        worth = worth if _verdict(tokens) is worth else Worth.UNKNOWN
    taken, words = {
        Worth.YES: (mine, f"PIC is worth it: {mine}"),
        Worth.NO: (other, f"PIC is not worth it, it loses: stay with {other}"),
        Worth.EQUAL: (other, f"PIC makes no difference: stay with {other}"),
        Worth.UNKNOWN: (None, "unknown, measure it"),
    }[worth]
    why = _why(profile, ours, theirs)
    return Advice(worth, taken, f"{words}. {mine} takes {ratio:.2f} of {other}'s {figure}; {why}.")


def _ratio(ours: ArmProfile, theirs: ArmProfile, predicted: Mapping[str, ArmPrediction]) -> float:
    return _cost(ours, predicted) / max(_cost(theirs, predicted), 1e-12)


def _verdict(ratio: float) -> Worth:
    if ratio < 1 - MARGIN:
        return Worth.YES
    return Worth.NO if ratio > 1 + MARGIN else Worth.EQUAL


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


#: What every output says.
SIMULATED = "simulation: no model was run"


@dataclass(frozen=True, slots=True)
class ProfileReport:
    """What is shown: counts, what a grid predicts of them, and the advice."""

    profile: TraceProfile
    predictor: GridPredictor | None
    predicted: Mapping[str, ArmPrediction]
    errors: PredictorErrors | None
    advice: Advice

    @property
    def table(self) -> Table:
        """A row for each arm."""
        columns: dict[str, list[str]] = {
            "arm": [arm.algorithm.spec for arm in self.profile.arms],
            "saved": [f"{arm.unbounded.saved:z.1%}" for arm in self.profile.arms],
        }
        counted = [arm.counted for arm in self.profile.arms]
        columns["computed a request"] = [
            f"{one.computed / one.requests:,.0f}" if one.requests else NOTHING for one in counted
        ]
        if self.profile.pool:
            name = f"saved, pool of {self.profile.pool:,}"
            columns[name] = [f"{one.saved:z.1%}" for one in counted]
            columns["evicted blocks"] = [f"{one.evicted_blocks:,}" for one in counted]
            columns["refused"] = [f"{one.refused:,}" for one in counted]
        if self.predicted:
            found = [self.predicted[name] for name in columns["arm"]]
            columns["TTFT, ms"] = [_ranged(f.ttft_s, f.ttft_s_range, _ms) for f in found]
            columns["requests/s"] = [
                _ranged(f.requests_s, f.requests_s_range, "{:,.2f}".format) for f in found
            ]
            columns["KV, GiB"] = [f"{f.kv_gib:.2f}" for f in found]
        if self._queues:
            columns["TTFT at its rate, ms"] = [_ranged(f.loaded_ttft_s, None, _ms) for f in found]
        rows = list(zip(*columns.values(), strict=True))
        return Table(self.profile.name, [Column(heading) for heading in columns], rows)

    def lines(self) -> Iterator[str]:
        """What stands above the table."""
        traffic = self.profile.traffic
        yield f"{SIMULATED}. {self.profile.name} ({self.profile.kind})"
        rate = f", {traffic.rate:.3g} a second" if traffic.rate else ""
        yield (
            f"{traffic.requests:,} request{'s' * (traffic.requests > 1)}{rate}; "
            f"{traffic.prompt / traffic.requests:,.0f} prompt tokens, "
            f"{traffic.chunks / traffic.requests:.1f} chunks and "
            f"{traffic.output / traffic.requests:,.0f} generated tokens each on average; "
            f"{traffic.repeated:.1%} of chunk tokens in chunks seen before"
        )
        yield (
            "Reuse is counted by token ids, block by block."
            if self.profile.exact
            else "Reuse is counted block by block; contents with different names count as "
            "different from their first token on."
        )

    def legend(self) -> str:
        """What the columns mean."""
        copies = any(getattr(arm.algorithm, "private", False) for arm in self.profile.arms)
        ranges = any(found.ttft_s_range for found in self.predicted.values())
        parts = {
            "saved: prompt tokens that need not be computed, less those of compiling chunks; by a "
            "cache that never evicts.": True,
            "Private copies are made from a tier that never forgets.": copies,
            "In brackets: where 90 % of the grid's single measurements lie around such a "
            "prediction, TTFT's around medians of as many such requests.": ranges,
            f"KV: of {self.profile.running} requests at a time.": self.predicted,
            "TTFT at its rate: by the formula of a queue.": self._queues,
        }
        return " ".join(text for text, shown in parts.items() if shown)

    def grid_lines(self) -> Iterator[str]:
        """What the predictions are worth."""
        if self.predictor is None:
            yield "No grid was measured: neither times nor memory are predicted."
            return
        yield f"Predicted from: {self.predictor.grid.about()}"
        if self.predictor.calibration:
            yield f"At the speed of: {self.predictor.calibration.about()}"
        if self.predictor.warning:
            yield f"Warning: {self.predictor.warning}"
        if self.errors:
            yield f"Leave-one-out error of TTFT: {self.errors.ttft or 'too few points'}"
            yield f"Leave-one-out error of requests/s: {self.errors.requests_s or 'too few points'}"
        pool = self.profile.pool
        crowded = [a.algorithm.spec for a in self.profile.arms if pool and a.peak_blocks > pool]
        if crowded:
            yield (
                f"{self.profile.running} requests at a time hold more than the pool, so they would "
                f"wait, which requests/s and KV leave out (lower --running): {', '.join(crowded)}"
            )
        outside = [name for name, found in self.predicted.items() if not found.inside]
        if outside:
            yield f"Outside of the measured grid, so extrapolated: {', '.join(outside)}"

    @property
    def _queues(self) -> bool:
        return bool(self.predicted and self.profile.traffic.rate)


def _ranged(
    value: float | None, ends: tuple[float, float] | None, text: Callable[[float], str]
) -> str:
    if value is None:
        return NOTHING
    return text(value) + (f" ({text(ends[0])}-{text(ends[1])})" if ends else "")


def _ms(seconds: float) -> str:
    return "overloaded" if isinf(seconds) else f"{seconds * 1e3:,.1f}"


def as_markdown(report: ProfileReport) -> str:
    """The report as a page."""
    blocks = [*report.lines(), report.table.markdown(right=1), report.legend()]
    return "\n\n".join([*blocks, *report.grid_lines(), f"**{report.advice.line}**"]) + "\n"


def as_text(report: ProfileReport) -> str:
    """The report for a terminal."""
    columns = list(zip(report.table.head, *report.table.texts(), strict=True))
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for first, *others in zip(*columns, strict=True):
        right = (text.rjust(width) for text, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join((first.ljust(widths[0]), *right)).rstrip())
    blocks = (report.lines(), lines, [report.legend()], report.grid_lines(), [report.advice.line])
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def as_json(report: ProfileReport) -> str:
    """All figures; times in seconds, None for what is infinite or not known."""
    profile, traffic, predictor = report.profile, report.profile.traffic, report.predictor
    calibration = predictor.calibration if predictor else None
    document = {
        "schema": 1,
        "simulation": True,
        "trace": {"name": profile.name, "kind": profile.kind, "exact": profile.exact},
        "pool": profile.pool,
        "running": profile.running,
        "traffic": {
            "requests": traffic.requests,
            "prompt_tokens": traffic.prompt,
            "output_tokens": traffic.output,
            "chunks": traffic.chunks,
            "chunk_tokens": traffic.chunk_tokens,
            "repeated": traffic.repeated,
            "rate": traffic.rate,
        },
        "arms": {arm.algorithm.spec: _arm(report, arm) for arm in profile.arms},
        "grid": predictor.grid.about() if predictor else None,
        "calibration": calibration.about() if calibration else None,
        "warning": predictor.warning if predictor else None,
        "errors": asdict(report.errors) if report.errors else None,
        "advice": asdict(report.advice),
    }
    return json.dumps(document, indent=1) + "\n"


def _arm(report: ProfileReport, arm: ArmProfile) -> dict[str, Any]:
    found = report.predicted.get(arm.algorithm.spec)
    figures = asdict(found) if found else {}
    finite = {k: None if isinstance(v, float) and isinf(v) else v for k, v in figures.items()}
    return {
        "unbounded": asdict(arm.unbounded) | {"saved": arm.unbounded.saved},
        "limited": asdict(arm.limited) | {"saved": arm.limited.saved} if arm.limited else None,
        "peak_blocks": arm.peak_blocks,
        "predicted": finite or None,
    }


FORMATS = {"text": as_text, "json": as_json, "markdown": as_markdown}
