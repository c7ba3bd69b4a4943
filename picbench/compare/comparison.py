"""What two runs have to have in common before their numbers can be compared."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from picbench.compare.arm import ArmComparison, MeasuredArm, compare_arms, measured_arms
from picbench.errors import ConfigError, IncomparableRuns, closest
from picbench.statistics.significance import holm
from picbench.store.reader import Run
from picbench.store.summary import BASELINE

#: Settings that do not change what is asked of an engine. The requests that were made from named
#: files are covered by the workload's fingerprint.
_NEUTRAL = {
    *("algo", "arm", "data", "offline", "on_bad_row", "output"),
    *("prompts", "requests", "self_check", "slo"),
}

#: Of the workload, what the fingerprint of its requests does not cover.
_WORKLOAD = ("fingerprint", "samples", "arrivals", "preloaded_chunks")
_SIZES = ("pool", "context")


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A field, by its path in manifest.json, in which two runs differ."""

    field: str
    before: object
    after: object

    def __str__(self) -> str:
        return f"{self.field} is {_short(self.before)} and {_short(self.after)}"


@dataclass(frozen=True, slots=True)
class Conditions:
    """Fields of a run by their paths in manifest.json.

    Two runs are comparable if their `workload` is the same: requests, settings, pool, cache. Where
    the `hardware` differs as well, times say nothing about the code. `versions` may differ: they
    are what is compared, often.
    """

    workload: Mapping[str, object]
    hardware: Mapping[str, object]
    versions: Mapping[str, object]


def conditions_of(manifest: Mapping[str, Any]) -> Conditions:
    """The conditions that a manifest states; what it does not state is left out."""
    config, workload = manifest.get("config", {}), manifest.get("workload", {})
    sizes, provenance = manifest.get("sizes", {}), manifest.get("provenance", {})
    cpu = provenance.get("cpu", {})
    return Conditions(
        workload={
            **{f"config.{name}": v for name, v in config.items() if name not in _NEUTRAL},
            **{f"workload.{name}": workload[name] for name in _WORKLOAD if name in workload},
            **{f"sizes.{name}": sizes[name] for name in _SIZES if name in sizes},
            **({"cache": manifest["cache"]} if "cache" in manifest else {}),
        },
        hardware={
            "provenance.cpu.model": cpu.get("model"),
            "provenance.cpu.cores": cpu.get("cores"),
            "provenance.gpus": [gpu.get("name") for gpu in provenance.get("gpus", [])],
        },
        versions={
            **{f"provenance.packages.{n}": v for n, v in provenance.get("packages", {}).items()},
            "provenance.git": provenance.get("git"),
        },
    )


def scored_conditions(run: Run) -> Conditions:
    """The conditions of a run, with what its scores are now: it may have been scored anew."""
    found = conditions_of(run.manifest)
    if not run.summary:
        return found
    metric = next(iter(run.summary.values())).score.metric
    return replace(found, workload={**found.workload, "summary.score.metric": metric})


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


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:12]}..."


@dataclass(frozen=True, slots=True)
class ComparisonSettings:
    """What to compare: two `arms`, None for all; the margin of scores; what to put up with."""

    arms: tuple[str, str] | None = None
    margin: float | None = None
    allow_mismatch: bool = False
    seed: int = 0


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

    @property
    def tests(self) -> int:
        """How many p values were adjusted for one another."""
        return sum(len(arm.metrics) for arm in self.arms)


def compare_runs(before: Run, after: Run, settings: ComparisonSettings) -> RunComparison:
    """Compare two runs: each arm with the arm of the same name, or one arm of each.

    Raises IncomparableRuns for runs that did not measure the same, unless that is allowed.
    """
    states = scored_conditions(before), scored_conditions(after)
    names = str(before.path), str(after.path)
    found = check_comparable(*states, names, allow=settings.allow_mismatch)
    first, second = measured_arms(before), measured_arms(after)
    if settings.arms is None:
        pairs = [(first[name], second[name]) for name in first if name in second]
    else:
        one, other = settings.arms
        pairs = [(_find(one, first, before.path), _find(other, second, after.path))]
    if not pairs:
        raise ConfigError(
            f"the runs have no arm in common: {', '.join(first)} and {', '.join(second)}",
            hint="name one of each in `arms`",
        )
    hardware = mismatches(states[0].hardware, states[1].hardware)
    notes = [
        *(f"times are of different hardware: {field}" for field in hardware),
        *_other_algorithms(before, after, pairs),
    ]
    if settings.arms is None and (alone := {*first} ^ {*second}):
        notes.append(f"only in one of the runs: {', '.join(sorted(alone))}")
    compared = [
        compare_arms(
            *pair,
            margin=settings.margin,
            apart=True,
            allow_mismatch=settings.allow_mismatch,
            seed=settings.seed,
        )
        for pair in pairs
    ]
    return _comparison(before, after, compared, settings, found, notes)


def compare_own_arms(run: Run, settings: ComparisonSettings) -> RunComparison:
    """Compare arms of one run: the two that are named, or `full` with each of the others."""
    arms, notes = measured_arms(run), list[str]()
    first = _find(settings.arms[0] if settings.arms else BASELINE, arms, run.path)
    others = [settings.arms[1]] if settings.arms else [name for name in arms if name != BASELINE]
    if not others:
        raise ConfigError(f"{run.path} has a single arm", hint="name a second run")
    found = [_find(name, arms, run.path) for name in others]
    compared = [compare_in_run(first, arm, settings, notes) for arm in found]
    return _comparison(run, run, compared, settings, (), notes)


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
    metrics = [metric for arm in arms for metric in arm.metrics]
    raised = iter(holm([metric.p for metric in metrics]))
    return tuple(
        replace(arm, metrics=tuple(replace(metric, p=next(raised)) for metric in arm.metrics))
        for arm in arms
    )


def _comparison(
    before: Run,
    after: Run,
    compared: Sequence[ArmComparison],
    settings: ComparisonSettings,
    found: Sequence[Mismatch],
    notes: Sequence[str],
) -> RunComparison:
    score = next(iter(before.summary.values())).score
    return RunComparison(
        before=str(before.path),
        after=str(after.path),
        metric=score.metric,
        meaningful=score.meaningful,
        settings=settings,
        arms=adjusted(compared),
        mismatches=tuple(found),
        notes=tuple(dict.fromkeys([*notes, *_states(before), *_states(after)])),
    )


def _find(name: str, arms: Mapping[str, MeasuredArm], path: Path) -> MeasuredArm:
    if name not in arms:
        raise ConfigError(f"{path} has no arm {name}", hint=closest(name, arms))
    return arms[name]


def _states(run: Run) -> Iterator[str]:
    status = run.manifest.get("status")
    if status != "complete":
        yield f"{run.path} is {status}: what it lacks is left out"
    if run.manifest.get("workload", {}).get("synthetic"):
        yield f"{run.path}: the rows are synthetic"
    for name, arm in run.summary.items():
        if arm.provenance == "simulated":
            yield f"{run.path}: the numbers of {name} are simulated"


def _other_algorithms(
    before: Run, after: Run, pairs: Sequence[tuple[MeasuredArm, MeasuredArm]]
) -> Iterator[str]:
    """Arms of one name that are not the same algorithm, or not on the same engine."""
    for first, second in pairs:
        known = [run.manifest.get("arms", {}).get(first.name, {}) for run in (before, after)]
        for field in ("algorithm", "stock"):
            if first.name == second.name and known[0].get(field) != known[1].get(field):
                yield (f"{first.name}: {field} is {known[0].get(field)} and {known[1].get(field)}")
