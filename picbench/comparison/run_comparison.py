"""Two runs, or the arms of one, compared."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from picbench.comparison.arm_comparison import ArmComparison, compare_arms
from picbench.comparison.conditions import (
    Mismatch,
    check_comparable,
    mismatches,
    scored_conditions,
)
from picbench.comparison.measured_arm import MeasuredArm, measured_arms
from picbench.errors import ConfigError, IncomparableRuns
from picbench.names import closest
from picbench.output.run_reader import Run
from picbench.output.summary import BASELINE
from picbench.statistics.significance import holm

_ArmPair = tuple[MeasuredArm, MeasuredArm]


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
    found = check_comparable(
        *states, (str(before.path), str(after.path)), allow=settings.allow_mismatch
    )
    first, second = measured_arms(before), measured_arms(after)
    if settings.arms is None:
        pairs = [(first[name], second[name]) for name in first if name in second]
    else:
        named = zip(settings.arms, (first, second), (before, after), strict=True)
        pairs = [tuple(_find(name, arms, run) for name, arms, run in named)]  # type: ignore[list-item]
    if not pairs:
        raise ConfigError(
            f"the runs have no arm in common: {', '.join(first)} and {', '.join(second)}",
            hint="name one of each in `arms`",
        )
    hardware = mismatches(states[0].hardware, states[1].hardware)
    notes = [
        *(f"times are of different hardware: {field}" for field in hardware),
        *_other_algorithms(before, after, pairs),
        *_left_out(first, second, settings),
    ]
    return _compare(before, after, pairs, settings, found, notes)


def compare_own_arms(run: Run, settings: ComparisonSettings) -> RunComparison:
    """Compare arms of one run: the two that are named, or `full` with each of the others."""
    arms = measured_arms(run)
    first = _find(settings.arms[0] if settings.arms else BASELINE, arms, run)
    others = [settings.arms[1]] if settings.arms else [name for name in arms if name != BASELINE]
    if not others:
        raise ConfigError(f"{run.path} has a single arm", hint="name a second run")
    return _compare(run, run, [(first, _find(name, arms, run)) for name in others], settings)


def compare_in_run(
    first: MeasuredArm, arm: MeasuredArm, settings: ComparisonSettings, notes: list[str]
) -> ArmComparison:
    """Compare two arms of a run, whatever their prompts are: `reorder` sends others.

    `notes` are told of such prompts. Raises IncomparableRuns where no sample is in both.
    """
    try:
        return compare_arms(first, arm, margin=settings.margin, seed=settings.seed)
    except IncomparableRuns as error:
        found = compare_arms(
            first, arm, margin=settings.margin, seed=settings.seed, allow_mismatch=True
        )
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


def _compare(
    before: Run,
    after: Run,
    pairs: Sequence[_ArmPair],
    settings: ComparisonSettings,
    found: Sequence[Mismatch] = (),
    notes: Sequence[str] = (),
) -> RunComparison:
    score = next(iter(before.summary.values())).score
    compared, more = list[ArmComparison](), list[str]()
    for first, second in pairs:
        if before is after:
            compared.append(compare_in_run(first, second, settings, more))
            continue
        compared.append(
            compare_arms(
                first,
                second,
                margin=settings.margin,
                apart=True,
                allow_mismatch=settings.allow_mismatch,
                seed=settings.seed,
            )
        )
    return RunComparison(
        before=str(before.path),
        after=str(after.path),
        metric=score.metric,
        meaningful=score.meaningful,
        settings=settings,
        arms=adjusted(compared),
        mismatches=tuple(found),
        notes=tuple(dict.fromkeys([*notes, *more, *_states(before), *_states(after)])),
    )


def _find(name: str, arms: Mapping[str, MeasuredArm], run: Run) -> MeasuredArm:
    if name not in arms:
        raise ConfigError(f"{run.path} has no arm {name}", hint=closest(name, arms))
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


def _other_algorithms(before: Run, after: Run, pairs: Sequence[_ArmPair]) -> Iterator[str]:
    """Arms of one name that are not the same algorithm, or not on the same engine."""
    for first, second in pairs:
        known = [run.manifest.get("arms", {}).get(first.name, {}) for run in (before, after)]
        for field in ("algorithm", "stock"):
            if first.name == second.name and known[0].get(field) != known[1].get(field):
                yield (f"{first.name}: {field} is {known[0].get(field)} and {known[1].get(field)}")


def _left_out(
    first: Mapping[str, MeasuredArm],
    second: Mapping[str, MeasuredArm],
    settings: ComparisonSettings,
) -> Iterator[str]:
    if settings.arms is None and (alone := {*first} ^ {*second}):
        yield f"only in one of the runs: {', '.join(sorted(alone))}"
