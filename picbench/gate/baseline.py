"""A baseline: what a run is held against, in one file that needs no run directory."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from math import exp, log
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from picbench.comparison.conditions import check_comparable, conditions_of, scored_conditions
from picbench.comparison.measured_arm import MeasuredArm, measured_arms
from picbench.errors import ConfigError, IncomparableRuns, InvalidRun
from picbench.gate.relative_times import with_relative_times
from picbench.gate.thresholds import CHECKED, Thresholds, usual_thresholds
from picbench.output.run_reader import Run

SCHEMA = 1

#: Digits of a millisecond that are kept.
_DIGITS = 3


#: A NaN would differ from nothing.
_Finite = Annotated[float, Field(allow_inf_nan=False)]


class _BaselineModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class BaselineArm(_BaselineModel):
    """The columns of a `MeasuredArm`; without `clusters` every sample is its own.

    Without `places` samples stand in the order of the run, as all do that were not repeated;
    without `repeats` there was one, or the file is from before they were kept and counts as one.
    `drift` is the standard deviation of the logarithm of mean times between the runs that the
    baseline was made from, by metric; empty for a single run.
    """

    samples: tuple[str, ...]
    rounds: tuple[int, ...]
    prompts: tuple[str, ...]
    outputs: tuple[str, ...]
    scores: tuple[_Finite | None, ...]
    times: Mapping[str, tuple[_Finite | None, ...]]
    counters: Mapping[str, tuple[int, ...]]
    totals: Mapping[str, _Finite]
    clusters: tuple[str, ...] | None = None
    places: tuple[int, ...] | None = Field(default=None, exclude_if=lambda places: places is None)
    repeats: tuple[int, ...] | None = Field(default=None, exclude_if=lambda found: found is None)
    drift: Mapping[str, _Finite] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _same_lengths(self) -> Self:
        names = ("rounds", "prompts", "outputs", "scores", "clusters", "places", "repeats")
        columns = {name: getattr(self, name) for name in names}
        columns |= {f"times.{name}": column for name, column in self.times.items()}
        columns |= {f"counters.{name}": column for name, column in self.counters.items()}
        for name, column in columns.items():
            if column is not None and len(column) != len(self.samples):
                raise ValueError(f"{name} has {len(column)} values, samples {len(self.samples)}")
        return self

    @classmethod
    def of(cls, arms: Sequence[MeasuredArm]) -> "BaselineArm":
        """One arm from the same arm of several runs: times are geometric means over these."""
        first = arms[0]
        values = asdict(first) | {"times": {name: _merge(name, arms) for name in first.times}}
        del values["name"]
        if first.clusters == first.samples:
            values["clusters"] = None
        if len(set(first.places)) == len(first.places):
            values["places"] = None
        if not any(first.repeats):
            values["repeats"] = None
        return cls(**values, drift=_drift(arms))

    def total(self, counter: str) -> float | None:
        """A count over all samples; None where the arm does not have it."""
        if counter in self.counters:
            return sum(self.counters[counter])
        return self.totals.get(counter)

    def measured(self, name: str) -> MeasuredArm:
        """The arm as comparisons take it."""
        values = self.model_dump(exclude={"drift"})
        clusters = self.clusters or self.samples
        places = self.places or tuple(range(len(self.samples)))
        repeats = self.repeats or (0,) * len(self.samples)
        filled = {"name": name, "clusters": clusters, "places": places, "repeats": repeats}
        return MeasuredArm(**values | filled)


class BaselineConditions(_BaselineModel):
    """See `Conditions`; `workload` names the arms' algorithms as well."""

    workload: Mapping[str, Any]
    hardware: Mapping[str, Any]
    versions: Mapping[str, Any] = Field(default_factory=dict)


class Baseline(_BaselineModel):
    """Thresholds, and what was measured in one or several `runs` of the same workload.

    Scores and counts are those of the first run.
    """

    baseline: int = SCHEMA
    made: str
    picbench: str
    runs: int = Field(ge=1)
    metric: str
    thresholds: Thresholds
    conditions: BaselineConditions
    arms: Mapping[str, BaselineArm] = Field(min_length=1)


def make_baseline(runs: Sequence[Run], thresholds: Thresholds | None = None) -> Baseline:
    """A baseline from complete runs of the same workload, of which there is at least one.

    Without `thresholds` they are the usual ones; counts that are not the same in all runs are
    then left out. Raises InvalidRun for an incomplete run, IncomparableRuns for different ones,
    ConfigError for a run that is named twice: it would say that nothing drifts between runs.
    """
    first = runs[0]
    _check_named_once(runs)
    for run in runs:
        check_complete(run)
        names = str(first.path), str(run.path)
        check_comparable(
            scored_conditions(first),
            scored_conditions(run),
            names,
            hint="save runs of one workload under one name",
        )
    arms = [with_relative_times(measured_arms(run)) for run in runs]
    for run, found in zip(runs, arms, strict=True):
        if found.keys() != arms[0].keys():
            raise IncomparableRuns(
                f"{first.path} has the arms {', '.join(arms[0])}, {run.path} {', '.join(found)}",
                hint="save runs of the same arms",
            )
    conditions = conditions_of(first.manifest)
    return Baseline(
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        picbench=version("picbench"),
        runs=len(runs),
        metric=next(iter(first.summary.values())).score.metric,
        thresholds=thresholds or usual_thresholds(_repeatable(arms), repeated=len(runs) > 1),
        conditions=BaselineConditions(
            workload=gate_workload(first),
            hardware=conditions.hardware,
            versions=conditions.versions,
        ),
        arms={name: BaselineArm.of([found[name] for found in arms]) for name in arms[0]},
    )


def _check_named_once(runs: Sequence[Run]) -> None:
    seen: set[Path] = set()
    for run in runs:
        place = run.path.resolve()
        if place in seen:
            raise ConfigError(f"`RUN` {run.path} is named twice", hint="name each run once")
        seen.add(place)


def gate_workload(run: Run) -> dict[str, object]:
    """What has to be the same in a run and its baseline, by field."""
    algorithms = {
        f"arms.{name}.{field}": arm.get(field)
        for name, arm in run.manifest.get("arms", {}).items()
        for field in ("algorithm", "stock")
    }
    return {**conditions_of(run.manifest).workload, **algorithms}


def check_complete(run: Run) -> None:
    """Raise InvalidRun for a run that did not end."""
    status = run.manifest.get("status")
    if status not in ("complete", "partial"):
        raise InvalidRun(f"{run.path} is {status}", hint="let it end, or run it again")


def _merge(name: str, arms: Sequence[MeasuredArm]) -> tuple[float | None, ...]:
    """Times of the first arm's samples; None where a run has none."""
    columns = [dict(zip(arm.samples, arm.times[name], strict=True)) for arm in arms]
    merged = []
    for sample in arms[0].samples:
        times = [column.get(sample) for column in columns]
        known = [log(time) for time in times if time]
        whole = len(known) == len(times)
        merged.append(round(exp(mean(known)), _digits(name)) if whole else None)
    return tuple(merged)


def _digits(name: str) -> int:
    return _DIGITS if name.endswith("_ms") else 2 * _DIGITS


def _drift(arms: Sequence[MeasuredArm]) -> dict[str, float]:
    if len(arms) < 2:
        return {}
    shared = set.intersection(*({*arm.samples} for arm in arms))
    drift = {}
    for name in arms[0].times:
        means = []
        for arm in arms:
            times = zip(arm.samples, arm.times[name], strict=True)
            known = [log(time) for sample, time in times if time and sample in shared]
            if known:
                means.append(mean(known))
        if len(means) == len(arms):
            drift[name] = round(stdev(means), 6)
    return drift


def _repeatable(runs: Sequence[Mapping[str, MeasuredArm]]) -> list[str]:
    """The counts that all runs agree on."""
    return [
        name
        for name in CHECKED
        if all(
            run[arm].counters.get(name) == first.counters.get(name)
            and run[arm].totals.get(name) == first.totals.get(name)
            for run in runs
            for arm, first in runs[0].items()
        )
    ]
