"""What a gate compares a run with: what it lets pass, and columns of every arm."""

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

from picbench.compare.arm import COUNTERS, RATES, TOTALS, MeasuredArm, measured_arms
from picbench.compare.comparison import check_comparable, conditions_of, scored_conditions
from picbench.errors import ConfigError, IncomparableRuns, InvalidRun, closest, first_refusal
from picbench.files import write_whole
from picbench.store.reader import Run
from picbench.store.summary import BASELINE
from picbench.tables.metrics import METRICS, SCORE, Pairing, metrics_paired

#: Of the file.
SCHEMA = 1

#: Where baselines with a name are, below the current directory, and how their names end.
FOLDER, _SUFFIXES = Path("baselines"), (".json", ".yaml", ".yml")

#: Relative times, and the milliseconds that they are made from.
RELATIVE = {m.name: m.base for m in metrics_paired(Pairing.RATIO) if m.over_full and m.base}

#: Counts that are checked where a baseline does not say, exactly.
CHECKED = tuple(n for n in (*COUNTERS, *TOTALS) if METRICS[n].usual is not None)

Tolerance = Annotated[float, Field(ge=0, allow_inf_nan=False)]

#: A NaN would differ from nothing.
_Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ScoreThreshold(_Model):
    """The loss of score, from 0 to 1, that is acceptable."""

    margin: float = Field(gt=0, le=1)


class TimeThreshold(_Model):
    """The slowdown that is acceptable, as a ratio of geometric means."""

    ratio: float = Field(gt=1, allow_inf_nan=False)


class RateThreshold(_Model):
    """The part of a rate that may be lost."""

    loss: float = Field(gt=0, lt=1)


def _if_given(threshold: object) -> bool:
    return threshold is None


class Thresholds(_Model):
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
    goodput_req_s: RateThreshold | None = Field(default=None, exclude_if=_if_given)
    throughput_tok_s: RateThreshold | None = Field(default=None, exclude_if=_if_given)
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

    @property
    def rates(self) -> dict[str, float]:
        """Acceptable losses by metric."""
        found = {name: getattr(self, name) for name in RATES}
        return {name: rate.loss for name, rate in found.items() if rate is not None}


#: The metrics with a `TimeThreshold`: milliseconds, then relative times.
TIME_METRICS = tuple(
    metric.name for metric in sorted(metrics_paired(Pairing.RATIO), key=lambda m: m.over_full)
)


def usual_thresholds(counters: Iterable[str], *, repeated: bool) -> Thresholds:
    """Tight on `counters` and scores, tight on relative times, loose on milliseconds.

    Milliseconds drift from run to run. How much is known of a baseline that is `repeated`; of a
    single run it is not, and then they may double.
    """
    usual = {name: METRICS[name].usual for name in (SCORE, *TIME_METRICS)}
    allowed = {name: both[repeated] for name, both in usual.items() if both is not None}
    return Thresholds(
        score=ScoreThreshold(margin=allowed.pop(SCORE)),
        counters=dict.fromkeys(counters, 0.0),
        **{name: TimeThreshold(ratio=ratio) for name, ratio in allowed.items()},  # type: ignore[arg-type]
    )


def with_relative_times(arms: Mapping[str, MeasuredArm]) -> dict[str, MeasuredArm]:
    """The arms with columns of relative times, where `full` is one of them."""
    full = arms.get(BASELINE)
    if full is None:
        return dict(arms)
    return {
        name: arm if arm is full else replace(arm, times={**arm.times, **_relative(arm, full)})
        for name, arm in arms.items()
    }


def _relative(arm: MeasuredArm, full: MeasuredArm) -> dict[str, tuple[float | None, ...]]:
    return {name: _over(arm, full, time) for name, time in RELATIVE.items()}


def _over(arm: MeasuredArm, full: MeasuredArm, time: str) -> tuple[float | None, ...]:
    base = dict(zip(full.samples, full.times[time], strict=True))
    pairs = zip(arm.samples, arm.times[time], strict=True)
    known = [(value, base.get(sample)) for sample, value in pairs]
    return tuple(value / other if value and other else None for value, other in known)


class BaselineArm(_Model):
    """The columns of a `MeasuredArm`; without `clusters` every sample is its own.

    Without `places` samples stand in the order of the run, as all do that were not repeated;
    without `repeats` there was one, or the file is from before they were kept and counts as one.
    `drift` is the standard deviation of the logarithm of mean times, and of rates, between the runs
    that the baseline was made from, by metric; empty for a single run.
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
    places: tuple[int, ...] | None = Field(default=None, exclude_if=_if_given)
    repeats: tuple[int, ...] | None = Field(default=None, exclude_if=_if_given)
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
        """One arm from the same arm of several runs: times and rates are geometric means."""
        first = arms[0]
        rates = {name: [arm.totals[name] for arm in arms] for name in _shared_rates(arms)}
        values = asdict(first) | {"times": {name: _merge(name, arms) for name in first.times}}
        values["totals"] |= {name: exp(mean(map(log, found))) for name, found in rates.items()}
        del values["name"]
        if first.clusters == first.samples:
            values["clusters"] = None
        if len(set(first.places)) == len(first.places):
            values["places"] = None
        if not any(first.repeats):
            values["repeats"] = None
        return cls(**values, drift=_drift(arms))

    def total(self, name: str) -> float | None:
        """A count over all samples, or a rate; None where the arm does not have it."""
        if name in self.counters:
            return sum(self.counters[name])
        return self.totals.get(name)

    def measured(self, name: str) -> MeasuredArm:
        """The arm as comparisons take it."""
        count = len(self.samples)
        filled = {
            "name": name,
            "clusters": self.clusters or self.samples,
            "places": self.places or tuple(range(count)),
            "repeats": self.repeats or (0,) * count,
        }
        return MeasuredArm(**self.model_dump(exclude={"drift"}) | filled)


class BaselineConditions(_Model):
    """See `Conditions`; `workload` names the arms' algorithms as well."""

    workload: Mapping[str, Any]
    hardware: Mapping[str, Any]
    versions: Mapping[str, Any] = Field(default_factory=dict)


class Baseline(_Model):
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
    """A baseline from complete runs of the same workload, at least one.

    Without `thresholds` they are the usual ones; counts that are not the same in all runs are
    then left out. Raises InvalidRun for an incomplete run, IncomparableRuns for different ones,
    ConfigError for a run that is named twice: it would say that nothing drifts between runs.
    """
    first, hint = runs[0], "save runs of one workload under one name"
    places = [run.path.resolve() for run in runs]
    for number, run in enumerate(runs):
        if places[number] in places[:number]:
            raise ConfigError(f"`RUN` {run.path} is named twice", hint="name each run once")
    for run in runs:
        check_complete(run)
        names = str(first.path), str(run.path)
        check_comparable(scored_conditions(first), scored_conditions(run), names, hint=hint)
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
    """Times of the first arm's samples, to a millionth of a ratio or of a second.

    None where a run has none.
    """
    columns = [dict(zip(arm.samples, arm.times[name], strict=True)) for arm in arms]
    found = [[column.get(sample) for column in columns] for sample in arms[0].samples]
    digits = 3 if name.endswith("_ms") else 6
    return tuple(
        round(exp(mean(log(time) for time in times if time)), digits) if all(times) else None
        for times in found
    )


def _shared_rates(arms: Sequence[MeasuredArm]) -> list[str]:
    return [name for name in RATES if all(arm.totals.get(name) for arm in arms)]


def _drift(arms: Sequence[MeasuredArm]) -> dict[str, float]:
    if len(arms) < 2:
        return {}
    shared = set.intersection(*({*arm.samples} for arm in arms))
    logs: dict[str, list[float]] = {}
    for name in arms[0].times:
        for arm in arms:
            times = zip(arm.samples, arm.times[name], strict=True)
            known = [log(time) for sample, time in times if time and sample in shared]
            if known:
                logs.setdefault(name, []).append(mean(known))
    logs |= {name: [log(arm.totals[name]) for arm in arms] for name in _shared_rates(arms)}
    return {name: round(stdev(found), 6) for name, found in logs.items() if len(found) == len(arms)}


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
