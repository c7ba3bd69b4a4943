"""A run against a baseline: a verdict for each metric of each arm."""

import json
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
    gate_workload,
    with_relative_times,
)
from picbench.compare.comparison import conditions_of, mismatches
from picbench.errors import IncomparableRuns
from picbench.statistics.significance import Loss
from picbench.store.provenance import annotation
from picbench.store.reader import Run
from picbench.tables.table import Column, Table

#: Chance that any time of an unchanged run is called a regression, over all times of the gate.
ALPHA = 0.01

#: Fewer clusters, documents or rows of their own, may all lose by a chance above 5 % (2 in 2^n).
_FEWEST_CLUSTERS = 6

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

    `after` is None where the run does not tell.
    """

    arm: str
    metric: str
    verdict: GateVerdict
    before: float
    after: float | None
    message: str


@dataclass(frozen=True, slots=True)
class GateResult:
    """All checks of a run, in the order of arms and metrics."""

    run: str
    baseline: str
    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()

    def found(self, verdict: GateVerdict) -> tuple[Check, ...]:
        """The checks with a verdict."""
        return tuple(check for check in self.checks if check.verdict is verdict)

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
    found = mismatches(baseline.conditions.workload, gate_workload(run))
    scored = {"metric": next(iter(run.summary.values())).score.metric}
    found += mismatches({"metric": baseline.metric}, scored)
    if found:
        raise IncomparableRuns(
            f"{run.path} did not measure what {name} has: {'; '.join(map(str, found))}",
            hint="run the baseline's workload, or save a new baseline",
        )
    arms = with_relative_times(measured_arms(run))
    missing = [arm for arm in baseline.arms if arm not in arms]
    if missing:
        raise IncomparableRuns(
            f"{run.path} lacks the arms {', '.join(missing)} of {name}",
            hint="run the arms of the baseline",
        )
    hardware = mismatches(baseline.conditions.hardware, conditions_of(run.manifest).hardware)
    checks = judge_arms(arms, baseline, times=not hardware)
    notes = [f"times cannot be judged on different hardware: {field}" for field in hardware]
    if more := [arm for arm in arms if arm not in baseline.arms]:
        notes.insert(0, f"Not checked, as the baseline has no such arm: {', '.join(more)}.")
    if baseline.runs == 1 and baseline.thresholds.times and not hardware:
        notes.append("The baseline is from one run, so that drift between runs is unknown.")
        if baseline.conditions.workload.get("workload.arrivals") is not None:
            notes.append("Arms of an open loop do not take turns: without `repeats` they drift.")
    if lacking := list(_unknown(baseline)):
        notes.append(f"Not checked, as the baseline has none: {', '.join(lacking)}.")
    return GateResult(str(run.path), name, checks, tuple(notes))


def judge_arms(
    arms: Mapping[str, MeasuredArm], baseline: Baseline, *, times: bool = True
) -> tuple[Check, ...]:
    """Check arms, with their relative times, against those of a baseline, all of which are there.

    Times are inconclusive unless `times` can be judged.
    """
    limits = baseline.thresholds
    margin = limits.score.margin if limits.score else None
    compared = {
        arm: compare_arms(saved.measured(arm), arms[arm], margin=margin, apart=True)
        for arm, saved in baseline.arms.items()
    }
    timed = [comparison.metric(n) for comparison in compared.values() for n in limits.times]
    tests = sum(metric is not None for metric in timed) + len(compared) * len(limits.rates)
    return tuple(
        Check(arm, *found)
        for arm, comparison in compared.items()
        for found in _ArmChecks(comparison, baseline, arms[arm], tests, times).found()
    )


def _unknown(baseline: Baseline) -> Iterator[str]:
    """What has a threshold, and is in no arm of the baseline."""
    arms, limits = baseline.arms.values(), baseline.thresholds
    if limits.score and all(score is None for arm in arms for score in arm.scores):
        yield "score"
    yield from (t for t in limits.times if not any(any(arm.times.get(t, ())) for arm in arms))
    for name in (*limits.rates, *limits.counters):
        if all(arm.total(name) is None for arm in arms):
            yield name


#: Metric, verdict, value before and after, and message of a `Check`.
_Found = tuple[str, GateVerdict, float, float | None, str]


class _ArmChecks:
    """The checks of one arm, among `tests` of times and rates, if these can be judged."""

    def __init__(
        self,
        comparison: ArmComparison,
        baseline: Baseline,
        measured: MeasuredArm,
        tests: int,
        judges_times: bool,
    ) -> None:
        self._comparison, self._baseline, self._measured = comparison, baseline, measured
        self._saved = baseline.arms[comparison.before]
        # Of all tests together, an unchanged run fails one by this chance.
        self._alpha, self._judges_times = ALPHA / max(1, tests), judges_times

    def found(self) -> Iterator[_Found]:
        """What the run lacks, which cannot pass; then counts, scores, times and rates."""
        limits, unsure = self._baseline.thresholds, GateVerdict.INCONCLUSIVE
        samples, pairs = len(self._saved.samples), self._comparison.pairs
        if pairs < samples:
            message = f"{samples:,} in the baseline, {pairs:,} of them answered now"
            yield "samples", unsure, samples, pairs, message
        for name in limits.times:
            expected, metric = self._expected(name), self._comparison.metric(name)
            timed = metric.change.pairs if metric else 0
            if timed < expected:
                message = f"measured of {expected:,} before, of {timed:,} of these now"
                yield name, unsure, expected, timed, message
        whole = {change.name: change for change in self._comparison.counters}
        whole |= {change.name: change for change in self._comparison.rates}
        for name, tolerance in limits.counters.items():
            if name in whole:
                yield self._count(whole[name], tolerance)
        for metric in self._comparison.metrics:
            if not metric.change.ratio and limits.score:
                yield self._score(metric, limits.score.margin)
            elif metric.name in limits.times:
                # A slowdown is a regression if it exceeds the limit and is no chance.
                ratio, limit = metric.change.value, limits.times[metric.name]
                message = f"{ratio:.3f}x, limit {limit:g}x"
                yield self._beyond(metric, ratio, limit, self._reach(metric), message)
        for name, loss in limits.rates.items():
            if name in whole:
                yield self._rate(whole[name], loss)
        # Remote servers count where told to.
        for name in (*limits.counters, *limits.rates):
            before = self._saved.total(name)
            if name not in whole and before is not None:
                yield name, unsure, before, None, f"{before:,g} before, not counted now"

    def _expected(self, name: str) -> int:
        """How many samples should have a time: those that had it and are answered.

        A reply of one token has no time per token, so there it takes the same reply as well.
        """
        saved = self._saved
        now = dict(zip(self._measured.samples, self._measured.outputs, strict=True))
        before = zip(saved.samples, saved.outputs, saved.times.get(name, ()), strict=False)
        replies_differ = name.startswith("tpot")
        return sum(
            time is not None and sample in now and not (replies_differ and now[sample] != reply)
            for sample, reply, time in before
        )

    def _count(self, counter: CounterChange, tolerance: float) -> _Found:
        away = abs(counter.after - counter.before)
        same = counter.same if not tolerance else away <= tolerance * abs(counter.before)
        message = f"{counter.before:,g} before, {counter.after:,g} now"
        if counter.samples:
            message += f", other in {counter.samples} of {self._comparison.pairs} samples"
        verdict = GateVerdict.OK if same else GateVerdict.REGRESSION
        return counter.name, verdict, counter.before, counter.after, message

    def _score(self, metric: MetricChange, margin: float) -> _Found:
        """A loss is a regression if it exceeds the margin and is no chance, of enough clusters.

        It is ok if it is below the margin with confidence or no sample's score differs from that
        in the baseline, and inconclusive otherwise.
        """
        change, interval = metric.change, metric.change.interval
        verdict = GateVerdict.INCONCLUSIVE
        if metric.loss is Loss.WITHIN or not (change.higher or change.lower):
            verdict = GateVerdict.OK
        elif change.value < -margin and interval is not None and interval.high < 0:
            enough = change.clusters >= _FEWEST_CLUSTERS
            verdict = GateVerdict.REGRESSION if enough else GateVerdict.INCONCLUSIVE
        text = f"{metric.before:.4f} before, {metric.after:.4f} now: {change.value:+.4f}"
        if interval is not None:
            text += f" ({interval.low:+.4f} to {interval.high:+.4f})"
        message = f"{text}, {metric.wins} won, {metric.losses} lost; margin {margin:g}"
        return metric.name, verdict, metric.before, metric.after, message

    def _rate(self, rate: CounterChange, loss: float) -> _Found:
        """A loss is a regression if it exceeds what may be lost and several runs drift less."""
        slower = rate.before / rate.after if rate.after else inf
        reach = self._noise(rate.name, 0.0, 1.0) if rate.name in self._saved.drift else None
        message = f"{rate.before:,.4g} before, {rate.after:,.4g} now, may lose {loss:.3g} of it"
        return self._beyond(rate, slower, 1 / (1 - loss), reach, message)

    def _beyond(
        self,
        metric: MetricChange | CounterChange,
        ratio: float,
        limit: float,
        reach: float | None,
        message: str,
    ) -> _Found:
        """A ratio above its limit is a regression unless chance, up to `reach`, explains it."""
        verdict = GateVerdict.OK
        if not self._judges_times:
            verdict = GateVerdict.INCONCLUSIVE
        elif ratio > limit:
            sure = reach is not None and log(ratio) > reach
            verdict = GateVerdict.REGRESSION if sure else GateVerdict.INCONCLUSIVE
        if reach is not None:
            # Of two samples or runs a t quantile is so large that its number says nothing.
            most = f"{exp(reach):.3f}x" if reach < log(_LARGEST_NOISE) else "any factor"
            message += f", noise up to {most}"
        return metric.name, verdict, metric.before, metric.after, message

    def _reach(self, metric: MetricChange) -> float | None:
        """How large a log ratio chance makes, at most: of samples and of the runs' drift.

        None where nothing says so: of a single cluster, and of relative times of arms that did not
        take turns, if neither repeats nor several saved runs tell how these drift apart.
        """
        change, baseline = metric.change, self._baseline
        # In an open loop one arm is served after the other.
        apart = baseline.conditions.workload.get("workload.arrivals") is not None
        untold = metric.name in RELATIVE and apart and change.repeats == baseline.runs == 1
        if change.clusters < 2 or untold:
            return None
        return self._noise(metric.name, change.standard_error, change.freedom)

    def _noise(self, name: str, error: float, freedom: float) -> float:
        """Of a standard error of samples, with its degrees of freedom, and of the runs' drift."""
        runs = self._baseline.runs
        within, drift = error**2, self._saved.drift.get(name, 0.0) ** 2 * (1 + 1 / runs)
        total = within + drift
        if not total:
            return 0.0
        # Welch's degrees of freedom: of the samples, and of the runs that drift is known from.
        both = total**2 / (within**2 / freedom + drift**2 / max(1, runs - 1))
        return float(stats.t.isf(self._alpha, both)) * sqrt(total)


#: Of the JSON document.
SCHEMA = 1

_LEVELS = {GateVerdict.REGRESSION: "error", GateVerdict.INCONCLUSIVE: "warning"}


def _text(result: GateResult) -> str:
    """A line for each check that is not ok, and the verdict."""
    lines = [
        f"{check.verdict.upper()} {check.arm} {check.metric}: {check.message}"
        for check in result.checks
        if check.verdict in _LEVELS
    ]
    return "\n".join([*lines, *result.notes, _verdict(result)])


def _json(result: GateResult) -> str:
    values = {"schema": SCHEMA, "verdict": result.verdict, **asdict(result)}
    return json.dumps(values, allow_nan=False)


def _annotations(result: GateResult) -> str:
    """A workflow command for each check that is not ok."""
    return "\n".join(
        annotation(_LEVELS[check.verdict], f"{check.arm} {check.metric}", check.message)
        for check in result.checks
        if check.verdict in _LEVELS
    )


def gate_markdown(result: GateResult) -> str:
    """The verdict, and a table of all checks, the worst first."""
    checks = [check for verdict in GateVerdict for check in result.found(verdict)]
    head = ("verdict", "arm", "metric", "baseline and run")
    rows = [(c.verdict, c.arm, c.metric, c.message) for c in checks]
    notes = "".join(f"\n{note}\n" for note in result.notes)
    table = Table("Checks", [*map(Column, head)], rows).markdown()
    return f"## {_verdict(result)}\n\n{table}\n{notes}"


def _junit(result: GateResult) -> str:
    """A test suite with a case for each check; inconclusive ones are skipped."""
    suite = ElementTree.Element(
        "testsuite",
        name=f"picbench gate {result.baseline}",
        tests=str(len(result.checks)),
        failures=str(len(result.found(GateVerdict.REGRESSION))),
        skipped=str(len(result.found(GateVerdict.INCONCLUSIVE))),
    )
    tags = {GateVerdict.REGRESSION: "failure", GateVerdict.INCONCLUSIVE: "skipped"}
    for check in result.checks:
        case = ElementTree.SubElement(suite, "testcase", classname=check.arm, name=check.metric)
        if check.verdict in tags:
            ElementTree.SubElement(case, tags[check.verdict], message=check.message)
        else:
            ElementTree.SubElement(case, "system-out").text = check.message
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)


#: What goes to stdout, by the name that users give.
FORMATS: Mapping[str, Callable[[GateResult], str]] = {
    "text": _text,
    "json": _json,
    "github": _annotations,
    "junit": _junit,
}


def _verdict(result: GateResult) -> str:
    order = (GateVerdict.OK, GateVerdict.REGRESSION, GateVerdict.INCONCLUSIVE)
    counts = [(verdict, len(result.found(verdict))) for verdict in order]
    found = ", ".join(f"{count} {verdict}" for verdict, count in counts if count)
    return f"{result.run} against {result.baseline}: {found or 'nothing to check'}"
