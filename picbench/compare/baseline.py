"""What a gate lets pass, metric by metric."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import version
from math import exp, log
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated, Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from picbench.compare.arm import COUNTERS, TOTALS, MeasuredArm, measured_arms
from picbench.compare.comparison import check_comparable, conditions_of, scored_conditions
from picbench.errors import ConfigError, IncomparableRuns, InvalidRun, closest, first_refusal
from picbench.files import write_whole
from picbench.store.reader import Run
from picbench.store.summary import BASELINE

#: Counts that depend on more than plans: on what was answered, or on when a tier was done.
_LOOSE = {"output_tokens", "tier_blocks", "loaded_bytes", "stored_bytes", "peak_resident_blocks"}

#: Counts that are checked where a baseline does not say, exactly.
CHECKED = tuple(name for name in (*COUNTERS, *TOTALS) if name not in _LOOSE)

Tolerance = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _ThresholdModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ScoreThreshold(_ThresholdModel):
    """The loss of score, from 0 to 1, that is acceptable."""

    margin: float = Field(gt=0, le=1)


class TimeThreshold(_ThresholdModel):
    """The slowdown that is acceptable, as a ratio of geometric means."""

    ratio: float = Field(gt=1, allow_inf_nan=False)


class Thresholds(_ThresholdModel):
    """What is checked of every arm; None: nothing of this.

    `ttft_vs_full` and `tpot_vs_full` are times as ratios to those of `full` on the same requests.
    `counters` have relative tolerances; 0 is exact.
    """

    score: ScoreThreshold | None = None
    ttft_ms: TimeThreshold | None = None
    tpot_ms: TimeThreshold | None = None
    e2e_ms: TimeThreshold | None = None
    ttft_vs_full: TimeThreshold | None = None
    tpot_vs_full: TimeThreshold | None = None
    counters: Mapping[str, Tolerance] = Field(default_factory=dict)

    @field_validator("counters")
    @classmethod
    def _known(cls, counters: Mapping[str, float]) -> Mapping[str, float]:
        unknown = [name for name in counters if name not in (*COUNTERS, *TOTALS)]
        if unknown:
            raise ValueError(f"no such count: {', '.join(unknown)}")
        return counters

    @property
    def times(self) -> dict[str, float]:
        """Acceptable slowdowns by metric."""
        found = {name: getattr(self, name) for name in TIME_METRICS}
        return {name: time.ratio for name, time in found.items() if time is not None}


#: The metrics with a `TimeThreshold`.
TIME_METRICS = ("ttft_ms", "tpot_ms", "e2e_ms", "ttft_vs_full", "tpot_vs_full")


def usual_thresholds(counters: Iterable[str], *, repeated: bool) -> Thresholds:
    """Tight on `counters` and scores, tight on relative times, loose on milliseconds.

    Milliseconds drift from run to run. How much is known of a baseline that is `repeated`; of a
    single run it is not, and then they may double.
    """
    loose = TimeThreshold(ratio=1.05 if repeated else 2.0)
    return Thresholds(
        score=ScoreThreshold(margin=0.01),
        ttft_ms=loose,
        tpot_ms=loose,
        ttft_vs_full=TimeThreshold(ratio=1.03),
        tpot_vs_full=TimeThreshold(ratio=1.03),
        counters=dict.fromkeys(counters, 0.0),
    )


#: Relative times, and the milliseconds that they are made from.
RELATIVE = {"ttft_vs_full": "ttft_ms", "tpot_vs_full": "tpot_ms"}


def with_relative_times(arms: Mapping[str, MeasuredArm]) -> dict[str, MeasuredArm]:
    """The arms with columns of relative times, where `full` is one of them."""
    if BASELINE not in arms:
        return dict(arms)
    full = arms[BASELINE]
    return {
        name: arm if name == BASELINE else replace(arm, times={**arm.times, **_relative(arm, full)})
        for name, arm in arms.items()
    }


def _relative(arm: MeasuredArm, full: MeasuredArm) -> dict[str, tuple[float | None, ...]]:
    return {name: _over(arm, full, time) for name, time in RELATIVE.items()}


def _over(arm: MeasuredArm, full: MeasuredArm, time: str) -> tuple[float | None, ...]:
    base = dict(zip(full.samples, full.times[time], strict=True))
    pairs = zip(arm.samples, arm.times[time], strict=True)
    known = [(value, base.get(sample)) for sample, value in pairs]
    return tuple(value / other if value and other else None for value, other in known)


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


#: Where baselines with a name are, below the current directory.
FOLDER = Path("baselines")

_SUFFIXES = (".json", ".yaml", ".yml")


def baseline_path(name: str) -> Path:
    """The file of a baseline: `name` itself if it is a path, else the one of that name."""
    path = Path(name)
    if path.suffix in _SUFFIXES or len(path.parts) > 1:
        return path
    found = [FOLDER / f"{name}{suffix}" for suffix in _SUFFIXES]
    return next((path for path in found if path.exists()), found[0])


def list_baselines() -> Iterator[tuple[str, Path]]:
    """Names and files of the baselines in the folder."""
    for path in sorted(FOLDER.glob("*")):
        if path.suffix in _SUFFIXES:
            yield path.stem, path


def read_baseline(name: str) -> Baseline:
    """Read a baseline by name or path.

    Raises ConfigError where there is none and for a wrong field, InvalidRun for another schema.
    """
    path = baseline_path(name)
    if not path.exists() and Path(name).is_file():
        path = Path(name)
    try:
        text = path.read_text(encoding="utf-8-sig")
        values = json.loads(text) if path.suffix == ".json" else _from_yaml(text)
    except OSError as error:
        names = [found for found, _ in list_baselines()]
        hint = closest(name, names) if names else "picbench baseline save makes one"
        raise ConfigError(f"`baseline` {path}: {error.strerror}", hint=hint) from error
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"`baseline` {path}: {error}", hint="save it again") from error
    _check_schema(path, values)
    try:
        return Baseline.model_validate(values)
    except ValidationError as error:
        message = f"`baseline` {path}: {first_refusal(error)}"
        raise ConfigError(message, hint="see docs/ci.md") from error


def write_baseline(path: Path, baseline: Baseline) -> None:
    """Write a baseline as JSON or YAML, whichever the name says, whole or not at all.

    Raises ConfigError if it cannot be written; a file that was there before then stays.
    """
    values = baseline.model_dump(mode="json", exclude_none=False)
    text = _to_yaml(values) if path.suffix in (".yaml", ".yml") else _to_json(values)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", hint="name another file") from error


def _check_schema(path: Path, values: object) -> None:
    schema = values.get("baseline") if isinstance(values, dict) else None
    if schema is None:
        raise ConfigError(f"`baseline` {path}: is no baseline", hint="save one from a run")
    if schema != SCHEMA:
        raise InvalidRun(
            f"{path} has schema {schema}, this version reads {SCHEMA}", hint="save it again"
        )


def _to_json(values: dict[str, Any]) -> str:
    """Indented where people read and edit, each column of an arm on a line of its own."""
    arms = values["arms"]
    head = json.dumps({**values, "arms": None}, indent=2, allow_nan=False)
    lines = ",\n".join(f"    {json.dumps(name)}: {_arm(arm)}" for name, arm in arms.items())
    return head.removesuffix("null\n}") + "{\n" + lines + "\n  }\n}\n"


def _arm(arm: dict[str, Any]) -> str:
    columns = ",\n".join(
        f"      {json.dumps(name)}: {json.dumps(value, allow_nan=False)}"
        for name, value in arm.items()
    )
    return "{\n" + columns + "\n    }"


def _to_yaml(values: dict[str, Any]) -> str:
    return str(yaml.dump(values, Dumper=_fast("SafeDumper"), sort_keys=False, width=1000))


def _from_yaml(text: str) -> Any:
    return yaml.load(text, Loader=_fast("SafeLoader"))


def _fast(name: str) -> Any:
    """libyaml's class where PyYAML was built with it: ten times as fast, and the same."""
    return getattr(yaml, f"C{name}", getattr(yaml, name))
