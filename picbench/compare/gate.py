"""A run against a baseline: a verdict for each metric of each arm."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from math import exp, inf, log, sqrt
from xml.etree import ElementTree

from scipy import stats  # type: ignore[import-untyped]

from picbench.compare.arm import (
    ArmComparison,
    CounterChange,
    MeasuredArm,
    MetricChange,
    compare_arms,
    measured_arms,
)
from picbench.compare.baseline import (
    RELATIVE,
    Baseline,
    check_complete,
    gate_conditions,
    with_relative_times,
)
from picbench.compare.comparison import mismatches
from picbench.errors import IncomparableRuns
from picbench.statistics.significance import SURE
from picbench.store.provenance import annotation
from picbench.store.reader import Run
from picbench.tables.metrics import OF_ANSWERS
from picbench.tables.table import Column, Table

#: Chance that any time of an unchanged run is called a regression, over all times of the gate.
ALPHA = 0.01

#: Samples that a line names at most, and how little a loss exceeds a margin by rounding.
_NAMED, _ROUNDING = 5, 1e-9

#: Noise above this factor is shown as any.
_LARGEST_NOISE = 100


class GateVerdict(StrEnum):
    """What a check found, the worst first."""

    REGRESSION = "regression"
    INCONCLUSIVE = "inconclusive"
    OK = "ok"


@dataclass(frozen=True, slots=True)
class Check:
    """One metric of one arm: its value in the baseline and in the run, and what follows.

    `after` is None where the run does not tell. What is inconclusive is `beyond` a margin if the
    loss that was measured is, though chance may explain it.
    """

    arm: str
    metric: str
    verdict: GateVerdict
    before: float
    after: float | None
    message: str
    beyond: bool = False

    @property
    def fails(self) -> bool:
        """Whether a gate may not pass with it, strict or not."""
        return self.beyond or self.verdict is GateVerdict.REGRESSION


@dataclass(frozen=True, slots=True)
class GateResult:
    """All checks of a run, in the order of arms and metrics."""

    run: str
    baseline: str
    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()

    def found(self, *verdicts: GateVerdict) -> list[Check]:
        """The checks with one of these verdicts."""
        return [check for check in self.checks if check.verdict in verdicts]

    @property
    def verdict(self) -> GateVerdict:
        """The worst of all checks."""
        return next((verdict for verdict in GateVerdict if self.found(verdict)), GateVerdict.OK)


def check_run(run: Run, baseline: Baseline, name: str) -> GateResult:
    """Check a run against a baseline called `name`.

    Raises InvalidRun for a run that did not end, and IncomparableRuns, with the fields that differ,
    for one of another workload or without an arm of the baseline.
    """
    check_complete(run)
    saved, now = baseline.conditions, gate_conditions(run)
    scored = {"metric": next(iter(run.summary.values())).score.metric}
    found = mismatches({**saved.workload, "metric": baseline.metric}, {**now.workload, **scored})
    if found:
        raise IncomparableRuns(
            f"{run.path} did not measure what {name} has: {'; '.join(map(str, found))}",
            hint="run the baseline's workload, or save a new baseline",
        )
    arms, limits = with_relative_times(measured_arms(run)), baseline.thresholds
    if missing := [arm for arm in baseline.arms if arm not in arms]:
        raise IncomparableRuns(
            f"{run.path} lacks the arms {', '.join(missing)} of {name}",
            hint="run the arms of the baseline",
        )
    hardware, notes = mismatches(saved.hardware, now.hardware), []
    if more := [arm for arm in arms if arm not in baseline.arms]:
        notes.append(f"Not checked, as the baseline has no such arm: {', '.join(more)}.")
    notes += [f"times cannot be judged on different hardware: {field}" for field in hardware]
    if baseline.runs == 1 and limits.times and not hardware:
        one_run = "The baseline is from one run, so that drift between runs is unknown"
        notes.append(f"{one_run}: save several.")
        if saved.workload.get("workload.arrivals") is not None:
            notes.append("Arms of an open loop do not take turns: without `repeats` they drift.")
    kept = baseline.arms.values()
    known = {
        **dict.fromkeys(
            ["score"] if limits.score else [], any(s is not None for a in kept for s in a.scores)
        ),
        **{t: any(any(a.times.get(t, ())) for a in kept) for t in limits.times},
        **{n: any(a.total(n) is not None for a in kept) for n in (*limits.rates, *limits.counters)},
    }
    if lacking := [metric for metric, is_known in known.items() if not is_known]:
        notes.append(f"Not checked, as the baseline has none: {', '.join(lacking)}.")
    checks = judge_arms(arms, baseline, times=not hardware)
    return GateResult(str(run.path), name, checks, tuple(notes))


def judge_arms(
    arms: Mapping[str, MeasuredArm], baseline: Baseline, *, times: bool = True
) -> tuple[Check, ...]:
    """Check arms, with their relative times, against those of a baseline, all of which are there.

    Times, and answers to the token, are inconclusive unless `times` of these machines compare.
    """
    limits = baseline.thresholds
    margin = limits.score["margin"] if limits.score else None
    compared = {
        name: compare_arms(saved, arms[name], margin=margin, apart=True)
        for name, saved in baseline.arms.items()
    }
    timed = [found.metric(time) for found in compared.values() for time in limits.times]
    tests = sum(metric is not None for metric in timed) + len(compared) * len(limits.rates)
    # Of all tests together, an unchanged run fails one by this chance.
    alpha = ALPHA / max(1, tests)
    return tuple(
        Check(name, *found)
        for name, comparison in compared.items()
        for found in _ArmChecks(comparison, baseline, arms[name], alpha, times).found()
    )


#: The fields of a `Check` but the arm, and what is judged by a ratio.
_Found = tuple[str, GateVerdict, float, float | None, str, bool]
_Change = MetricChange | CounterChange


@dataclass(frozen=True, slots=True)
class _ArmChecks:
    """The checks of one arm, each of a time or rate at level `alpha`, if machines are `alike`."""

    comparison: ArmComparison
    baseline: Baseline
    measured: MeasuredArm
    alpha: float
    alike: bool

    @property
    def saved(self) -> MeasuredArm:
        return self.baseline.arms[self.comparison.before]

    def found(self) -> Iterator[_Found]:
        """What the run lacks, which cannot pass; then counts, scores, times and rates."""
        limits, unsure = self.baseline.thresholds, GateVerdict.INCONCLUSIVE
        samples, pairs = len(self.saved.samples), self.comparison.pairs
        if pairs < samples:
            message = f"{samples:,} in the baseline, {pairs:,} of them answered now"
            lost, margin = self._at_worst(), limits.score["margin"] if limits.score else inf
            if gone := lost > margin + _ROUNDING:
                message += f"; {-lost:+.4f} if all others score 0, margin {margin:g}"
            exact = limits.outputs is not None and self.alike
            yield "samples", unsure, samples, pairs, message, gone or exact
        for name in limits.times:
            expected, metric = self._expected(name), self.comparison.metric(name)
            timed = metric.change.pairs if metric else 0
            if timed < expected:
                message = f"measured of {expected:,} before, of {timed:,} of these now"
                yield name, unsure, expected, timed, message, name in OF_ANSWERS
        whole = {c.name: c for c in (*self.comparison.counters, *self.comparison.rates)}
        for name, tolerance in limits.counters.items():
            if name in whole:
                yield self._count(whole[name], tolerance)
        yield from self._outputs()
        for metric in self.comparison.metrics:
            if not metric.change.ratio and limits.score:
                yield self._score(metric, limits.score["margin"])
            elif metric.name in limits.times:
                # A slowdown is a regression if it exceeds the limit and is no chance.
                ratio, limit = metric.change.value, limits.times[metric.name]
                message = f"{ratio:.3f}x, limit {limit:g}x"
                yield self._beyond(metric, ratio, limit, self._reach(metric), message)
        for name, loss in limits.rates.items():
            if name in whole:
                rate = whole[name]
                # A loss is a regression if it exceeds the limit and several runs drift less.
                slower = rate.before / rate.after if rate.after else inf
                reach = self._noise(name, 0.0, 1.0) if name in self.saved.drift else None
                message = f"{rate.before:,.4g} before, {rate.after:,.4g} now"
                message += f", may lose {loss:.3g} of it"
                yield self._beyond(rate, slower, 1 / (1 - loss), reach, message)
        # Remote servers count where told to.
        for name in (*limits.counters, *limits.rates):
            before = self.saved.total(name)
            if name not in whole and before is not None:
                message, beyond = f"{before:,g} before, not counted now", name in limits.rates
                yield name, unsure, before, None, message, beyond and self.alike

    def _at_worst(self) -> float:
        """The loss of score if whatever is not answered now scores 0."""
        now, saved = dict(zip(self.measured.samples, self.measured.scores, strict=True)), self.saved
        before = zip(saved.samples, saved.scores, strict=True)
        lost = sum((score or 0.0) - (now.get(sample) or 0.0) for sample, score in before)
        return lost / len(saved.samples)

    def _expected(self, name: str) -> int:
        """How many samples should have a time: those that had it and are answered.

        A reply of one token has no time per token, so there it takes the same reply as well.
        """
        saved, replies_differ = self.saved, name.startswith("tpot")
        now = dict(zip(self.measured.samples, self.measured.outputs, strict=True))
        before = zip(saved.samples, saved.outputs, saved.times.get(name, ()), strict=False)
        return sum(
            time is not None and sample in now and not (replies_differ and now[sample] != reply)
            for sample, reply, time in before
        )

    def _count(self, counter: CounterChange, tolerance: float) -> _Found:
        away = abs(counter.after - counter.before)
        same = counter.same if not tolerance else away <= tolerance * abs(counter.before)
        message = f"{counter.before:,g} before, {counter.after:,g} now"
        if counter.samples:
            message += f", other in {counter.samples} of {self.comparison.pairs} samples"
        verdict = GateVerdict.OK if same else GateVerdict.REGRESSION
        return counter.name, verdict, counter.before, counter.after, message, False

    def _outputs(self) -> Iterator[_Found]:
        """Answers with other tokens, where there are some or the baseline asks for the same."""
        answers, reworded = self.comparison.repeatability, self.comparison.reworded
        asked = self.baseline.thresholds.outputs is not None
        if not asked and not reworded:
            return
        message = f"{answers.differing} of {answers.pairs} answers have other tokens"
        if reworded:
            more = ", ..." * (len(reworded) > _NAMED)
            named = ", ".join(reworded[:_NAMED])
            message += f", {len(reworded)} of them at an equal score: {named}{more}"
        verdict = GateVerdict.OK
        if asked and answers.differing:
            verdict = GateVerdict.REGRESSION if self.alike else GateVerdict.INCONCLUSIVE
        yield OUTPUTS, verdict, 0, answers.differing, message, False

    def _score(self, metric: MetricChange, margin: float) -> _Found:
        """A loss on these requests beyond the margin is a regression, unless it may be chance."""
        change, p = metric.change, metric.change.p
        verdict = GateVerdict.OK
        if change.value < -margin - _ROUNDING:
            sure = p is not None and p < SURE
            verdict = GateVerdict.REGRESSION if sure else GateVerdict.INCONCLUSIVE
        message = (
            f"{metric.before:.4f} before, {metric.after:.4f} now: {change.value:+.4f}, "
            f"{metric.wins} won, {metric.losses} lost, p {p:.2g}; margin {margin:g}"
        )
        unsure = verdict is GateVerdict.INCONCLUSIVE
        return metric.name, verdict, metric.before, metric.after, message, unsure

    def _beyond(
        self, metric: _Change, ratio: float, limit: float, reach: float | None, message: str
    ) -> _Found:
        """A ratio above its limit is a regression unless chance, up to `reach`, explains it."""
        verdict, answers = GateVerdict.OK, metric.name in OF_ANSWERS
        if not (self.alike or answers):  # The machine changes times, and no answers.
            verdict = GateVerdict.INCONCLUSIVE
        elif ratio > limit:
            sure = reach is not None and log(ratio) > reach
            verdict = GateVerdict.REGRESSION if sure else GateVerdict.INCONCLUSIVE
        if reach is not None:
            # Of two samples or runs a t quantile is so large that its number says nothing.
            most = f"{exp(reach):.3f}x" if reach < log(_LARGEST_NOISE) else "any factor"
            message += f", noise up to {most}"
        # Rates have a margin if the user sets one; times always drift beyond theirs at times.
        margin = answers or (isinstance(metric, CounterChange) and self.alike)
        beyond = margin and verdict is GateVerdict.INCONCLUSIVE
        return metric.name, verdict, metric.before, metric.after, message, beyond

    def _reach(self, metric: MetricChange) -> float | None:
        """How large a log ratio chance makes, at most: of samples and of the runs' drift.

        None where nothing says so: of a single cluster, and of relative times of arms that did not
        take turns, if neither repeats nor several saved runs tell how these drift apart.
        """
        change, baseline = metric.change, self.baseline
        # In an open loop one arm is served after the other.
        apart = baseline.conditions.workload.get("workload.arrivals") is not None
        untold = metric.name in RELATIVE and apart and change.repeats == baseline.runs == 1
        if change.clusters < 2 or untold:
            return None
        return self._noise(metric.name, change.standard_error, change.freedom)

    def _noise(self, name: str, error: float, freedom: float) -> float:
        """Of a standard error of samples, with its degrees of freedom, and of the runs' drift."""
        runs = self.baseline.runs
        within, drift = error**2, self.saved.drift.get(name, 0.0) ** 2 * (1 + 1 / runs)
        total = within + drift
        if not total:
            return 0.0
        # Welch's degrees of freedom: of the samples, and of the runs that drift is known from.
        both = total**2 / (within**2 / freedom + drift**2 / max(1, runs - 1))
        return float(stats.t.isf(self.alpha, both)) * sqrt(total)


#: Of the JSON document.
SCHEMA = 1

#: The check that is told whatever its verdict is.
OUTPUTS = "outputs"


def _told(result: GateResult) -> list[Check]:
    """What is not ok, and answers with other tokens."""
    ok = GateVerdict.OK
    return [c for c in result.checks if c.verdict != ok or (c.metric == OUTPUTS and c.after)]


def _text(result: GateResult) -> str:
    """A line for each check that is told, and the verdict."""
    lines = (f"{c.verdict.upper()} {c.arm} {c.metric}: {c.message}" for c in _told(result))
    return "\n".join([*lines, *result.notes, _verdict(result)])


def _json(result: GateResult) -> str:
    found = {"schema": SCHEMA, "verdict": result.verdict, **asdict(result)}
    return json.dumps(found, allow_nan=False)


def _annotations(result: GateResult) -> str:
    """A workflow command for each check that is told."""
    return "\n".join(
        annotation(_words(check)[0], f"{check.arm} {check.metric}", check.message)
        for check in _told(result)
    )


def _words(check: Check) -> tuple[str, str]:
    """What GitHub and JUnit call what was found."""
    if check.fails:
        return "error", "failure"
    if check.verdict is GateVerdict.INCONCLUSIVE:
        return "warning", "skipped"
    return "notice", "system-out"


def gate_markdown(result: GateResult) -> str:
    """The verdict, and a table of all checks, the worst first."""
    checks = [check for verdict in GateVerdict for check in result.found(verdict)]
    head = ("verdict", "arm", "metric", "baseline and run")
    rows = [(c.verdict, c.arm, c.metric, c.message) for c in checks]
    notes = "".join(f"\n{note}\n" for note in result.notes)
    table = Table("Checks", [*map(Column, head)], rows).markdown()
    return f"## {_verdict(result)}\n\n{table}\n{notes}"


def _junit(result: GateResult) -> str:
    """A test suite with a case for each check; inconclusive ones are skipped unless they fail."""
    elements = [(check, _words(check)[1]) for check in result.checks]
    counts = Counter(element for _, element in elements)
    suite = ElementTree.Element(
        "testsuite",
        name=f"picbench gate {result.baseline}",
        tests=str(len(elements)),
        failures=str(counts["failure"]),
        skipped=str(counts["skipped"]),
    )
    for check, element in elements:
        case = ElementTree.SubElement(suite, "testcase", classname=check.arm, name=check.metric)
        if element == "system-out":
            ElementTree.SubElement(case, element).text = check.message
        else:
            ElementTree.SubElement(case, element, message=check.message)
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)


def _verdict(result: GateResult) -> str:
    order = (GateVerdict.OK, GateVerdict.REGRESSION, GateVerdict.INCONCLUSIVE)
    counts = ((verdict, len(result.found(verdict))) for verdict in order)
    found = ", ".join(f"{count} {verdict}" for verdict, count in counts if count)
    return f"{result.run} against {result.baseline}: {found or 'nothing to check'}"


#: What goes to stdout, by the name that users give.
FORMATS: Mapping[str, Callable[[GateResult], str]] = {
    "text": _text,
    "json": _json,
    "github": _annotations,
    "junit": _junit,
}
