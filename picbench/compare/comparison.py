"""Runs that are compared, what they must have in common for that, and the formats of the answer."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.console import Console

from picbench.compare.arm import (
    ArmComparison,
    Drift,
    MeasuredArm,
    MetricChange,
    compare_arms,
    measured_arms,
)
from picbench.errors import ConfigError, IncomparableRuns, closest
from picbench.settings import ComparisonSettings
from picbench.statistics.intervals import FEW, Interval, Quantile
from picbench.statistics.significance import Loss, holm, unseen_share
from picbench.store.reader import Run
from picbench.store.summary import BASELINE, MARKS
from picbench.tables.metrics import METRICS
from picbench.tables.run import times_sooner
from picbench.tables.table import NOTHING, WIDTH, Column, Shown, Table, Value

#: Settings that do not change what is asked of an engine. The requests that were made from named
#: files are covered by the workload's fingerprint.
_NEUTRAL = {
    *("algo", "arm", "data", "offline", "on_bad_row", "output"),
    *("prompts", "requests", "self_check", "slo"),
}

#: Of the workload, what the fingerprint of its requests does not cover; of a CPU, what times need.
_WORKLOAD = ("fingerprint", "samples", "arrivals", "preloaded_chunks")
_CPU = ("model", "cores", "instructions")


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A field, by its path in manifest.json, in which two runs differ."""

    field: str
    before: object
    after: object

    def __str__(self) -> str:
        sides = (str(self.before), str(self.after))
        before, after = (side if len(side) <= 24 else f"{side[:12]}..." for side in sides)
        return f"{self.field} is {before} and {after}"


@dataclass(frozen=True, slots=True)
class Conditions:
    """Fields of a run by their paths in manifest.json.

    Two runs are comparable if their `workload` is the same: requests, settings, pool, cache. Where
    the `hardware` differs as well, times say nothing about the code. `versions` may differ: they
    are what is compared, often.
    """

    workload: Mapping[str, Any]
    hardware: Mapping[str, Any]
    versions: Mapping[str, Any] = field(default_factory=dict)


def conditions_of(manifest: Mapping[str, Any]) -> Conditions:
    """The conditions that a manifest states; what it does not state is left out."""
    config, workload = manifest.get("config", {}), manifest.get("workload", {})
    sizes, provenance = manifest.get("sizes", {}), manifest.get("provenance", {})
    cpu = provenance.get("cpu", {})
    return Conditions(
        workload={
            **{f"config.{name}": v for name, v in config.items() if name not in _NEUTRAL},
            **{f"workload.{name}": workload[name] for name in _WORKLOAD if name in workload},
            **{f"sizes.{name}": sizes[name] for name in ("pool", "context") if name in sizes},
            **({"cache": manifest["cache"]} if "cache" in manifest else {}),
        },
        hardware={
            **{f"provenance.cpu.{name}": cpu[name] for name in _CPU if name in cpu},
            "provenance.gpus": [gpu.get("name") for gpu in provenance.get("gpus", [])],
        },
        versions={
            **{f"provenance.packages.{n}": v for n, v in provenance.get("packages", {}).items()},
            "provenance.git": provenance.get("git"),
        },
    )


def scored_conditions(run: Run) -> Conditions:
    """The conditions of a run, with what its scores are now: it may have been scored anew."""
    found, workload = conditions_of(run.manifest), dict[str, Any]()
    for arm in run.summary.values():
        workload["summary.score.metric"] = arm.score.metric
    return replace(found, workload={**found.workload, **workload})


def mismatches(before: Mapping[str, object], after: Mapping[str, object]) -> list[Mismatch]:
    """Fields that differ. One that is unknown to either side is newer than it, and is passed."""
    return [
        Mismatch(field, value, after[field])
        for field, value in before.items()
        if field in after and after[field] != value
    ]


def check_comparable(
    before: Conditions,
    after: Conditions,
    names: tuple[str, str],
    *,
    allow: bool = False,
    hint: str = "repeat one of them, or give `allow_mismatch` to compare them all the same",
) -> list[Mismatch]:
    """The fields that differ; IncomparableRuns names them, with a `hint`, if none may differ."""
    found = mismatches(before.workload, after.workload)
    if found and not allow:
        raise IncomparableRuns(
            f"{names[0]} and {names[1]} did not measure the same: {'; '.join(map(str, found))}",
            hint=hint,
        )
    return found


@dataclass(frozen=True, slots=True)
class RunComparison:
    """The arms of run `before` against those of run `after`, which may be the same run.

    Scores of `metric` are not `meaningful` with random weights. `mismatches` are fields in which
    the runs differ although they should not; there are some only where that was allowed. `notes`
    say what else to know.
    """

    before: str
    after: str
    metric: str
    meaningful: bool
    settings: ComparisonSettings
    arms: tuple[ArmComparison, ...]
    mismatches: tuple[Mismatch, ...] = ()
    notes: tuple[str, ...] = ()


def compare_runs(before: Run, after: Run, settings: ComparisonSettings) -> RunComparison:
    """Compare two runs: each arm with the arm of the same name, or one arm of each.

    Raises IncomparableRuns for runs that did not measure the same, unless that is allowed.
    """
    states = scored_conditions(before), scored_conditions(after)
    names, allowed = (str(before.path), str(after.path)), settings.allow_mismatch
    found = check_comparable(*states, names, allow=allowed)
    first, second = measured_arms(before), measured_arms(after)
    hardware = mismatches(states[0].hardware, states[1].hardware)
    notes = [f"times are of different hardware: {field}" for field in hardware]
    if settings.arms is not None:
        one, other = settings.arms
        pairs = [(_find(one, first, before), _find(other, second, after))]
    else:
        pairs = [(first[name], second[name]) for name in first if name in second]
    if not pairs:
        raise ConfigError(
            f"the runs have no arm in common: {', '.join(first)} and {', '.join(second)}",
            hint="name one of each in `arms`",
        )
    for name in (one.name for one, other in pairs if one.name == other.name):
        known = [run.manifest.get("arms", {}).get(name, {}) for run in (before, after)]
        for word in ("algorithm", "stock"):
            if known[0].get(word) != known[1].get(word):
                notes.append(f"{name}: {word} is {known[0].get(word)} and {known[1].get(word)}")
    if settings.arms is None and (alone := {*first} ^ {*second}):
        notes.append(f"only in one of the runs: {', '.join(sorted(alone))}")
    given: dict[str, Any] = {"margin": settings.margin, "seed": settings.seed}
    arms = [compare_arms(*pair, apart=True, allow_mismatch=allowed, **given) for pair in pairs]
    return _comparison(before, after, arms, settings, notes, found)


def compare_own_arms(run: Run, settings: ComparisonSettings) -> RunComparison:
    """Compare arms of one run: the two that are named, or `full` with each of the others."""
    arms, notes = measured_arms(run), list[str]()
    name, *others = settings.arms or (BASELINE, *(name for name in arms if name != BASELINE))
    first = _find(name, arms, run)
    if not others:
        raise ConfigError(f"{run.path} has a single arm", hint="name a second run")
    found = [_find(name, arms, run) for name in others]
    compared = [compare_in_run(first, arm, settings, notes) for arm in found]
    return _comparison(run, run, compared, settings, notes)


def compare_in_run(
    first: MeasuredArm, arm: MeasuredArm, settings: ComparisonSettings, notes: list[str]
) -> ArmComparison:
    """Compare two arms of a run, whatever their prompts are: `reorder` sends others.

    `notes` are told of such prompts. Raises IncomparableRuns where no sample is in both.
    """
    given: dict[str, Any] = {"margin": settings.margin, "seed": settings.seed}
    try:
        return compare_arms(first, arm, **given)
    except IncomparableRuns as error:
        found = compare_arms(first, arm, allow_mismatch=True, **given)
        notes.append(f"{arm.name}: {error.message}")
        return found


def adjusted(arms: Sequence[ArmComparison]) -> tuple[ArmComparison, ...]:
    """The comparisons with p values adjusted for being several, over arms and metrics (Holm)."""
    raised = iter(holm([m.p for arm in arms for m in arm.metrics if m.p is not None]))
    return tuple(
        replace(
            arm,
            metrics=tuple(m if m.p is None else replace(m, p=next(raised)) for m in arm.metrics),
        )
        for arm in arms
    )


def _comparison(
    before: Run,
    after: Run,
    compared: Sequence[ArmComparison],
    settings: ComparisonSettings,
    notes: list[str],
    found: Sequence[Mismatch] = (),
) -> RunComparison:
    for run in (before, after):
        if (status := run.manifest.get("status")) != "complete":
            notes.append(f"{run.path} is {status}: what it lacks is left out")
        if run.manifest.get("workload", {}).get("synthetic"):
            notes.append(f"{run.path}: the rows are synthetic")
        for name, arm in run.summary.items():
            notes += (f"{run.path}: {name} is {mark}: {MARKS[mark]}" for mark in arm.marks)
    score = next(iter(before.summary.values())).score
    return RunComparison(
        before=str(before.path),
        after=str(after.path),
        metric=score.metric,
        meaningful=score.meaningful,
        settings=settings,
        arms=adjusted(compared),
        mismatches=tuple(found),
        notes=tuple(dict.fromkeys(notes)),
    )


def _find(name: str, arms: Mapping[str, MeasuredArm], run: Run) -> MeasuredArm:
    if name not in arms:
        raise ConfigError(f"{run.path} has no arm {name}", hint=closest(name, arms))
    return arms[name]


#: Flipped samples that are listed; the JSON format has them all.
FLIPS = 10

#: Of the JSON document; it changes when a field goes or changes its meaning.
SCHEMA = 2

_LOSSES = {
    Loss.WITHIN: "loses less than {:g}, with 95 % confidence",
    Loss.BEYOND: "loses more than {:g}, with 95 % confidence",
    Loss.UNKNOWN: "whether it loses more than {:g} is open",
}


def metric_table(comparison: RunComparison, arm: ArmComparison) -> Table:
    """Scores and times."""
    head = ("metric", "before", "after", "change", "95 % interval", "p", "better/same/worse")
    rows: list[Sequence[Value]] = []
    for metric in arm.metrics:
        change, ratio = metric.change, metric.change.ratio
        digits = METRICS[metric.name].digits if ratio else 3
        pattern, ends = f"{{:,.{digits}f}}", "{:.3f}" if ratio else "{:+.4f}"
        rows.append(
            [
                metric.name if ratio else metric.name.replace("score", comparison.metric, 1),
                Shown(pattern.format(metric.before), metric.before),
                Shown(pattern.format(metric.after), metric.after),
                Shown(ends.format(change.value) + "x" * ratio, change.value),
                _interval(change.interval, ends) + drift_words(metric),
                Shown(_p(metric.p), metric.p),
                Shown(f"{metric.wins}/{change.equal}/{metric.losses}", metric.wins - metric.losses),
            ]
        )
    return Table("", [*map(Column, head)], rows)


def _parts(comparison: RunComparison, arm: ArmComparison) -> Iterator[Table | str]:
    """Metrics, quantiles, rates, counts that differ, samples that changed most; then notes."""
    quantiles: list[Sequence[Value]] = [
        [f"{of.name} p{100 * of.before.q:g}", _quantile(of.before), _quantile(of.after)]
        for of in arm.quantiles
    ]
    rates: list[Sequence[Value]] = []
    for rate in arm.rates:
        change = f"{rate.after / rate.before:.3f}x" if rate.before else NOTHING
        rates.append([rate.name, f"{rate.before:,.4g}", f"{rate.after:,.4g}", change])
    counts: list[Sequence[Value]] = [
        [count.name, f"{count.before:,g}", f"{count.after:,g}", count.samples]
        for count in arm.counters
        if not count.same
    ]
    flips = [[flip.sample, flip.before, flip.after] for flip in arm.flips[:FLIPS]]
    if arm.metrics:
        yield metric_table(comparison, arm)
    for head, rows, digits in (
        (("quantile", "before (95 %)", "after (95 %)"), quantiles, None),
        (("rate of the arm", "before", "after", "change"), rates, None),
        (("count", "before", "after", "samples that differ"), counts, None),
        (("flipped sample", "before", "after"), flips, 3),
    ):
        if rows:
            yield Table("", [Column(title, digits) for title in head], rows)
    yield from arm_notes(comparison, arm)


def _quantile(found: Quantile) -> str:
    if found.value is None:
        return f"n={found.count}, needs {found.needed}"
    return f"{found.value:,.1f} ({_interval(found.interval, '{:,.1f}')})"


def _interval(interval: Interval | None, pattern: str) -> str:
    if interval is None:
        return NOTHING
    return f"{pattern.format(interval.low)} to {pattern.format(interval.high)}"


def _p(value: float | None) -> str:
    if value is None:
        return NOTHING
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def arm_notes(comparison: RunComparison, arm: ArmComparison) -> Iterator[str]:
    """What the tables of an arm do not say."""
    same = [counter.name for counter in arm.counters if counter.same]
    if len(same) == len(arm.counters):
        yield f"All {len(same)} counts are the same."
    elif same:
        yield f"The same: {', '.join(same)}."
    if arm.repeatability.pairs:
        answers = f"{arm.repeatability.differing} of {arm.repeatability.pairs} answers"
        yield f"{answers} have other tokens."
    if (more := len(arm.flips) - FLIPS) > 0:
        yield f"{more} more samples flipped; the format json lists them."
    for metric in arm.metrics:
        yield from decision(metric, comparison)


def verdict_sentence(comparison: RunComparison, arm: ArmComparison) -> str:
    """What is to be concluded of an arm: its time, and whether its answers got worse."""
    times, answers = list[str](), list[str]()
    for metric in arm.metrics:
        change, interval = metric.change, metric.change.interval
        if metric.name == "ttft_ms" and interval is not None:
            known = not interval.low <= 1 <= interval.high
            times.append(times_sooner(change.value) if known else "with no difference that shows")
        elif not change.ratio and comparison.meaningful:
            answers.append(_answers(metric))
    said = [*(f"first token {time}" for time in times), *answers]
    return f"Verdict: {arm.after} against {arm.before}: {'; '.join(said) or 'nothing to compare'}."


def _answers(metric: MetricChange) -> str:
    lost, won, p = metric.losses, metric.wins, metric.change.p
    counts = f"{lost} worse, {won} better of {metric.change.pairs}"
    if not lost + won:
        return "no answer has another score"
    if p is not None and p < 0.05:
        return f"answers get {'worse' if lost > won else 'better'} ({counts})"
    return f"whether answers get worse is open ({counts})"


def decision(metric: MetricChange, comparison: RunComparison) -> Iterator[str]:
    """What is known of a score: on these requests, and on other documents."""
    margin = comparison.settings.margin
    if metric.change.ratio:
        return
    yield f"{metric.name}: {on_these(metric)}."
    yield f"{metric.name} on other documents: {on_others(metric, margin)}."
    if margin is None and metric.needed and metric.needed > metric.change.pairs:
        yield f"{metric.name}: about {metric.needed:,} samples for an interval of one point."


def on_these(metric: MetricChange) -> str:
    """How a score changed on the requests that were asked, which no other ones can alter."""
    change = metric.change
    counts = f"{metric.losses} lost, {metric.wins} won of {change.pairs}"
    return f"{counts} on these requests, exact p {_p(change.p)}"


def on_others(metric: MetricChange, margin: float | None) -> str:
    """What is known of a score where requests have other documents, and else why it is not."""
    change, unseen = metric.change, unseen_share(metric.change)
    if change.unknown:
        return f"not known, as {change.unknown}"
    if margin is None or metric.loss is None:
        return f"p {_p(change.p_others)}"
    words = _LOSSES[metric.loss].format(margin)
    if metric.loss is not Loss.UNKNOWN:
        return words
    if unseen is not None:
        words = f"none differs, but a loss in {unseen:.0%} of samples may go unseen"
    return words + (f"; about {metric.needed:,} samples would decide" if metric.needed else "")


def run_notes(comparison: RunComparison) -> Iterator[str]:
    """What holds for all arms."""
    metrics = [metric for arm in comparison.arms for metric in arm.metrics]
    yield from (f"MISMATCH: {mismatch}" for mismatch in comparison.mismatches)
    yield from comparison.notes
    if not comparison.meaningful:
        yield "Random or dummy weights: scores are not meaningful."
    yield (
        f"p in tables: of no change, on these requests for scores, adjusted for {len(metrics)} "
        "tests (Holm); else unadjusted."
    )
    yield (
        "Times: ratios of geometric means, over rounds of requests; intervals by BCa bootstrap, "
        f"over up to {FEW} rounds by Student's t."
    )
    yield "Intervals of scores: of other documents, which may score from 0 to 1."
    sides = [side for arm in comparison.arms for q in arm.quantiles for side in (q.before, q.after)]
    for repeats in sorted({quantile.repeats for quantile in sides if quantile.interval}):
        yield f"Intervals of quantiles: {quantile_method(repeats)}."
    if comparison.before != comparison.after:
        yield (
            "Times of separate runs also drift, which no interval here has in it: compare how arms "
            "relate within each run."
        )
        return
    alone = "one arm served all requests, then the next one."
    if any(metric.drift is Drift.UNSEEN for metric in metrics):
        yield (
            f"Drift not included: {alone} If the machine got slower or faster meanwhile, these "
            "ratios have that in them, but not their intervals and p; three repeats or more put it "
            "there."
        )
    if repeated := {m.change.repeats for m in metrics if m.drift is Drift.REPEATS}:
        few = " Two repeats say little of others: more make these narrower."
        yield (
            f"Over repeats: {alone} What the machine did meanwhile is in these intervals as far as "
            f"it differs from repeat to repeat.{few if 2 in repeated else ''}"
        )


def drift_words(metric: MetricChange) -> str:
    """What stands after the interval of a time whose two sides did not take turns; else nothing."""
    if metric.drift is Drift.REPEATS:
        return f", over {metric.change.repeats} repeats"
    return ", drift not included" if metric.drift is Drift.UNSEEN else ""


def quantile_method(repeats: int) -> str:
    """How the intervals of quantiles are made, and what is not in them."""
    if repeats < 2:
        return (
            "order statistics of the requests of one repeat; what else the machine does at another "
            "time is not in them"
        )
    few = "; two repeats say little of others, so they are wide" if repeats == 2 else ""
    return f"order statistics over requests, and Student's t over {repeats} repeats{few}"


def _json(comparison: RunComparison) -> str:
    """One line, with every flipped sample."""
    settings = comparison.settings.model_dump()
    document = {"schema": SCHEMA, **asdict(comparison), "settings": settings}
    return json.dumps(document, allow_nan=False)


def _written(comparison: RunComparison) -> Iterator[tuple[str, list[Table | str]]]:
    """The heading of each arm, over which samples it is compared, and what follows."""
    for arm in comparison.arms:
        text = f"{arm.after} against {arm.before}: {arm.pairs} samples"
        clusters = {metric.change.clusters for metric in arm.metrics if not metric.change.ratio}
        if clusters and max(clusters) < arm.pairs:
            text += " that share documents"
            text += f", worth {max(clusters)} that do not" if max(clusters) > 1 else ""
        text += f", {arm.unpaired} without a partner" if arm.unpaired else ""
        yield text, list(_parts(comparison, arm))


def _markdown(comparison: RunComparison) -> str:
    parts = [f"## {comparison.after} against {comparison.before}"]
    for heading, found in _written(comparison):
        tables = (part if isinstance(part, str) else part.markdown(right=1) for part in found)
        parts += [f"### {heading}", *tables]
    notes = "\n".join(f"- {note}" for note in run_notes(comparison))
    verdicts = (f"**{verdict_sentence(comparison, arm)}**" for arm in comparison.arms)
    return "\n\n".join([*parts, notes, *verdicts]) + "\n"


def _text(comparison: RunComparison) -> str:
    parts: list[str | Table] = []
    if comparison.before != comparison.after:
        parts.append(f"before: {comparison.before}\nafter:  {comparison.after}")
    for heading, found in _written(comparison):
        parts += [f"\n{heading}", *found]
    console = Console(width=WIDTH, highlight=False, no_color=True)
    with console.capture() as captured:
        for part in (*parts, "", *run_notes(comparison)):
            console.print(part, markup=False)
        console.print()
        for arm in comparison.arms:
            console.print(verdict_sentence(comparison, arm), markup=False)
    return captured.get()


#: By the name that users give.
FORMATS: Mapping[str, Callable[[RunComparison], str]] = {
    "text": _text,
    "json": _json,
    "markdown": _markdown,
    "github": _markdown,
}
