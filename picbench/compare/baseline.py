"""What a gate compares a run with: what it lets pass, and columns of every arm."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import version
from math import exp, log
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    field_serializer,
    field_validator,
)
from typing_extensions import TypedDict

from picbench.compare.arm import COUNTERS, RATES, TOTALS, MeasuredArm, measured_arms
from picbench.compare.comparison import (
    Conditions,
    check_comparable,
    conditions_of,
    scored_conditions,
)
from picbench.errors import ConfigError, IncomparableRuns, InvalidRun, closest
from picbench.files import reading, write_whole
from picbench.store.reader import Run
from picbench.store.summary import BASELINE
from picbench.tables.metrics import METRICS, SCORE, Pairing, metrics_paired

#: Of the file.
SCHEMA = 1

#: Where baselines with a name are, below the current directory, and how their names end.
FOLDER, _SUFFIXES = Path("baselines"), (".json", ".yaml", ".yml")

#: Relative times, and the milliseconds that they are made from.
RELATIVE = {m.name: m.base for m in metrics_paired(Pairing.RATIO) if m.over_full and m.base}

#: The metrics with a limit of their ratio: milliseconds, then relative times.
TIME_METRICS = tuple(
    metric.name for metric in sorted(metrics_paired(Pairing.RATIO), key=lambda m: m.over_full)
)

#: libyaml's classes where PyYAML was built with it: ten times as fast, and the same.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Model(BaseModel):
    # A NaN would differ from nothing.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class _Margin(TypedDict):
    """The loss of score, from 0 to 1, that is acceptable."""

    margin: Annotated[float, Field(ge=1e-6, le=1)]


class _Slowdown(TypedDict):
    """The acceptable ratio of geometric means."""

    ratio: Annotated[float, Field(gt=1)]


class _Loss(TypedDict):
    """The part of a rate that may be lost."""

    loss: Annotated[float, Field(gt=0, lt=1)]


#: Is left out of files where it is None.
_UNSET: Any = Field(default=None, exclude_if=lambda value: value is None)


class Thresholds(_Model):
    """What is checked of every arm; None: nothing of this.

    `outputs` are the answers' tokens. `ttft_vs_full` and `tpot_vs_full` are times as ratios to
    those of `full` on the same requests. `counters` have relative tolerances; 0 is exact.
    """

    score: _Margin | None = None
    outputs: Literal["exact"] | None = _UNSET
    ttft_ms: _Slowdown | None = None
    tpot_ms: _Slowdown | None = None
    e2e_ms: _Slowdown | None = None
    ttft_vs_full: _Slowdown | None = None
    tpot_vs_full: _Slowdown | None = None
    perplexity: _Slowdown | None = _UNSET
    exp_kl: _Slowdown | None = _UNSET
    goodput_req_s: _Loss | None = _UNSET
    throughput_tok_s: _Loss | None = _UNSET
    counters: Mapping[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)

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
        return {name: limit["ratio"] for name in TIME_METRICS if (limit := getattr(self, name))}

    @property
    def rates(self) -> dict[str, float]:
        """Acceptable losses by metric."""
        return {name: limit["loss"] for name in RATES if (limit := getattr(self, name))}


def usual_thresholds(
    runs: Sequence[Mapping[str, MeasuredArm]], *, alike: bool = False
) -> Thresholds:
    """Tight on scores, relative times and counts that all `runs` agree on, loose on milliseconds.

    These drift from run to run. How much is known of several runs; of one it is not, and then they
    may double. Answers are asked for to the token if runs of one arithmetic, `alike`, gave the same
    each time.
    """
    known = {n for arm in runs[0].values() for n, column in arm.times.items() if any(column)}
    usual = {
        name: both[len(runs) > 1]
        for name in (SCORE, *TIME_METRICS)
        if (both := METRICS[name].usual) and (name in known or not METRICS[name].optional)
    }
    margin = usual.pop(SCORE)
    counters = {
        name: 0.0
        for name in (*COUNTERS, *TOTALS)
        if METRICS[name].usual is not None
        and all(
            run[arm].counters.get(name) == first.counters.get(name)
            and run[arm].totals.get(name) == first.totals.get(name)
            for run in runs
            for arm, first in runs[0].items()
        )
    }
    limits: dict[str, object] = {name: {"ratio": ratio} for name, ratio in usual.items()}
    if alike and _repeat_answers(runs):
        limits["outputs"] = "exact"
    return Thresholds.model_validate({"score": {"margin": margin}, "counters": counters, **limits})


def _repeat_answers(runs: Sequence[Mapping[str, MeasuredArm]]) -> bool:
    """Whether arms answered their prompts several times, in repeats or runs, and ever alike."""
    again = len(runs) > 1 or any(any(arm.repeats) for arm in runs[0].values())
    for arm in runs[0]:
        columns = [(run[arm].prompts, run[arm].outputs) for run in runs]
        answers = {answer for column in columns for answer in zip(*column, strict=True)}
        again = again and len(answers) == len({prompt for prompt, _ in answers})
    return again


def _alike(runs: Sequence[Run]) -> bool:
    """Whether runs computed in float32 with the same instructions, so that answers may repeat."""
    engines = [a.get("engine") or {} for r in runs for a in r.manifest.get("arms", {}).values()]
    hardware = [conditions_of(run.manifest).hardware for run in runs]
    same = all(known == hardware[0] for known in hardware)
    return same and all(engine.get("dtype") == "float32" for engine in engines)


def with_relative_times(arms: Mapping[str, MeasuredArm]) -> dict[str, MeasuredArm]:
    """The arms with columns of relative times, where `full` is one of them."""
    full = arms.get(BASELINE)
    if full is None:
        return dict(arms)
    found = {}
    for name, arm in arms.items():
        times = dict(arm.times)
        for relative, time in RELATIVE.items() if arm is not full else ():
            base = dict(zip(full.samples, full.times[time], strict=True))
            times[relative] = tuple(
                value / other if value and (other := base.get(sample)) else None
                for sample, value in zip(arm.samples, arm.times[time], strict=True)
            )
        found[name] = replace(arm, times=times)
    return found


class Baseline(_Model):
    """Thresholds, and what was measured in one or several `runs` of the same workload.

    Scores and counts are those of the first run, times and rates geometric means. `conditions` name
    the arms' algorithms as well.
    """

    baseline: int = SCHEMA
    made: str
    picbench: str
    runs: int = Field(ge=1)
    metric: str
    thresholds: Thresholds
    conditions: Conditions
    arms: Mapping[str, MeasuredArm] = Field(min_length=1)

    @field_validator("arms", mode="before")
    @classmethod
    def _filled(cls, arms: Any) -> Any:
        """Add what files leave out: names, samples that are clusters, a single repeat."""
        if not isinstance(arms, Mapping):
            return arms
        found = {}
        for name, arm in arms.items():
            if isinstance(arm, Mapping) and isinstance(arm.get("samples"), Sequence):
                samples = arm["samples"]
                usual = {"clusters": samples, "places": range(len(samples))}
                usual["repeats"] = (0,) * len(samples)
                arm = {"name": name, **arm, **{k: arm.get(k) or v for k, v in usual.items()}}
            found[name] = arm
        return found

    @field_serializer("arms")
    def _stored(self, arms: Mapping[str, MeasuredArm]) -> dict[str, dict[str, Any]]:
        found = {}
        for name, arm in arms.items():
            values = asdict(arm)
            clusters, places, repeats, drift = map(
                values.pop, ("clusters", "places", "repeats", "drift")
            )
            del values["name"], values["documents"]
            values["clusters"] = None if arm.clusters == arm.samples else clusters
            if len({*places}) < len(places):
                values["places"] = places
            if any(repeats):
                values["repeats"] = repeats
            found[name] = values | {"drift": drift}
        return found


def make_baseline(runs: Sequence[Run], thresholds: Thresholds | None = None) -> Baseline:
    """A baseline from complete runs of the same workload, at least one.

    Without `thresholds` they are the usual ones. Raises InvalidRun for an incomplete run,
    IncomparableRuns for different ones, ConfigError for a run that is named twice: it would say
    that nothing drifts between runs.
    """
    first, seen = runs[0], set[Path]()
    for run in runs:
        if run.path.resolve() in seen:
            raise ConfigError(f"`RUN` {run.path} is named twice", hint="name each run once")
        seen.add(run.path.resolve())
    for run in runs:
        check_complete(run)
        names = str(first.path), str(run.path)
        hint = "save runs of one workload under one name"
        check_comparable(scored_conditions(first), scored_conditions(run), names, hint=hint)
    arms = [with_relative_times(measured_arms(run)) for run in runs]
    for run, found in zip(runs, arms, strict=True):
        if found.keys() != arms[0].keys():
            raise IncomparableRuns(
                f"{first.path} has the arms {', '.join(arms[0])}, {run.path} {', '.join(found)}",
                hint="save runs of the same arms",
            )
    return Baseline(
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        picbench=version("picbench"),
        runs=len(runs),
        metric=next(iter(first.summary.values())).score.metric,
        thresholds=thresholds or usual_thresholds(arms, alike=_alike(runs)),
        conditions=gate_conditions(first),
        arms={name: merge_arms([found[name] for found in arms]) for name in arms[0]},
    )


def gate_conditions(run: Run) -> Conditions:
    """The conditions of a run, with the algorithms of its arms."""
    found = conditions_of(run.manifest)
    algorithms = {
        f"arms.{name}.{field}": arm.get(field)
        for name, arm in run.manifest.get("arms", {}).items()
        for field in ("algorithm", "stock")
    }
    return replace(found, workload={**found.workload, **algorithms})


def check_complete(run: Run) -> None:
    """Raise InvalidRun for a run that did not end."""
    status = run.manifest.get("status")
    if status not in ("complete", "partial"):
        raise InvalidRun(f"{run.path} is {status}", hint="let it end, or run it again")


def merge_arms(arms: Sequence[MeasuredArm]) -> MeasuredArm:
    """One arm from the same arm of several runs.

    Times are those of the first arm's samples, to a millionth of a ratio or of a second; None where
    a run has none.
    """
    first, times = arms[0], {}
    totals = {name: float(total) for name, total in first.totals.items()}
    shared = set.intersection(*({*arm.samples} for arm in arms))
    logs = dict[str, list[float]]()
    for name in first.times:
        columns = [dict(zip(arm.samples, arm.times[name], strict=True)) for arm in arms]
        digits = 3 if name.endswith("_ms") else 6
        rows = [[column.get(sample) for column in columns] for sample in first.samples]
        times[name] = tuple(
            round(exp(mean(log(time) for time in row if time)), digits) if all(row) else None
            for row in rows
        )
        known = [[log(t) for s, t in column.items() if t and s in shared] for column in columns]
        if all(known):
            logs[name] = [mean(of_run) for of_run in known]
    for name in RATES:
        if all(rates := [arm.totals.get(name, 0.0) for arm in arms]):
            logs[name] = [log(rate) for rate in rates]
            totals[name] = exp(mean(logs[name]))
    drift = {name: round(stdev(found), 6) for name, found in logs.items()} if len(arms) > 1 else {}
    return replace(first, times=times, totals=totals, drift=drift)


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
    names = [found for found, _ in list_baselines()]
    hint = closest(name, names) if names else "picbench baseline save makes one"
    with reading(f"`baseline` {path}", missing=hint, wrong="save it again"):
        text = path.read_text(encoding="utf-8-sig")
        is_json = path.suffix == ".json"
        values = json.loads(text) if is_json else yaml.load(text, Loader=_LOADER)
    schema = values.get("baseline") if isinstance(values, dict) else None
    if schema is None:
        raise ConfigError(f"`baseline` {path}: is no baseline", hint="save one from a run")
    if schema != SCHEMA:
        message = f"{path} has schema {schema}, this version reads {SCHEMA}"
        raise InvalidRun(message, hint="save it again")
    with reading(f"`baseline` {path}", wrong="see docs/ci.md"):
        return Baseline.model_validate(values)


def write_baseline(path: Path, baseline: Baseline) -> None:
    """Write a baseline as JSON or YAML, whichever the name says, whole or not at all.

    Raises ConfigError if it cannot be written; a file that was there before then stays.
    """
    values = baseline.model_dump(mode="json")
    if path.suffix in (".yaml", ".yml"):
        text = yaml.dump(values, Dumper=_DUMPER, sort_keys=False, width=1000)
    else:
        text = _to_json(values)
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", hint="name another file") from error


def _to_json(values: Mapping[str, Any]) -> str:
    """Indented where people read and edit, each column of an arm on a line of its own."""
    arms = []
    for name, arm in values["arms"].items():
        columns = (
            f"      {json.dumps(column)}: {json.dumps(value, allow_nan=False)}"
            for column, value in arm.items()
        )
        arms.append(f"    {json.dumps(name)}: {{\n" + ",\n".join(columns) + "\n    }")
    head = json.dumps({**values, "arms": None}, indent=2, allow_nan=False)
    return head.removesuffix("null\n}") + "{\n" + ",\n".join(arms) + "\n  }\n}\n"
