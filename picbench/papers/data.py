"""Compact data of experiments: points, arms and metrics, and how tables show them."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import TypeAdapter

from picbench.errors import ConfigError, DataError
from picbench.files import write_json
from picbench.papers.settings import Point
from picbench.tables.table import Column, Shown, Table, Value
from picbench.workloads.traffic.traffic_facts import TrafficFacts


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
    columns = [Column(heading) for heading in head]
    return Table(title, columns, [[_shown(value) for value in row] for row in rows], notes, name)


def _shown(value: Value) -> Value:
    if isinstance(value, float):
        return Shown(f"{value:,.0f}" if value.is_integer() else f"{value:,.2f}", value)
    return Shown(str(value), value) if isinstance(value, int) else value


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


#: Prompt tokens a second: of requests that run together, and of one at a time. CPU: two cores of an
#: AMD EPYC, testbed model; CUDA: H200, shapes of 7 and 8 billion weights (results/papers).
COMPUTED: Mapping[str, float] = {"cpu": 3_400, "cuda": 41_000}
ALONE: Mapping[str, float] = {"cpu": 2_700, "cuda": 38_000}

#: What a token of a cached chunk takes of the time of one that is computed.
_REUSED = 0.2

#: Arms that compute what the same text does not precede.
_PREFIX_ONLY = ("full", "prefix")

#: Seconds until engines answer that start together: start, compilation, graphs, first requests.
START: Mapping[str, float] = {"cpu": 25, "cuda": 100}

#: Tokens of the question of a single request.
QUESTION = 32


def expected_load(point: Point, facts: TrafficFacts) -> float:
    """About how many seconds a load takes: each arm until all have arrived and are served."""
    return sum(expected_arm(arm, facts, point.device) for arm in point.arms)


def expected_arm(arm: str, facts: TrafficFacts, device: str) -> float:
    """About how many seconds an arm takes; what was measured corrects it (`TimeBudget`)."""
    tokens = facts.mean_tokens
    if arm.partition(":")[0] not in _PREFIX_ONLY:
        tokens = facts.fresh_tokens + _REUSED * (facts.mean_tokens - facts.fresh_tokens)
    arriving = facts.requests / facts.rate if facts.rate else 0.0
    return max(facts.requests * tokens / COMPUTED[device], arriving)


SCHEMA = 1

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
class ExperimentData:
    """All points of an experiment on a device.

    `conditions` say what ran where: a ``caption`` for tables, and a few words each about ``model``,
    ``hardware`` and ``commit`` for figures.
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
    def repeated(self) -> str:
        """How many seeds or repeats each point has: ``3``, or ``2 to 3`` if some have fewer."""
        counts = Counter(point.label for point in self.points).values()
        least, most = min(counts), max(counts)
        return str(most) if least == most else f"{least} to {most}"

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

    def spread(self, label: str, arm: str, metric: str) -> "SeedSpread":
        """A metric over seeds."""
        return SeedSpread(tuple(self.values(label, arm, metric).values()))

    @property
    def single_requests(self) -> bool:
        """Whether requests came one at a time, so that `seed` is the number of a repeat."""
        return "chunk_tokens" in self.points[0].facts

    @property
    def repeats(self) -> str:
        """What `seed` counts: seeds, or rows of a data set."""
        return self.conditions.get("repeats", "seeds")

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


def conditions(
    caption: str, model: str, hardware: str, commit: str, **more: str
) -> Mapping[str, str]:
    """The conditions of an experiment; those that count rows have `repeats` beside."""
    about = {"caption": caption, "model": model, "hardware": hardware, "commit": commit[:7]}
    return about | more


def read_all(folder: Path) -> list[ExperimentData]:
    """All experiments in a folder, by name of their files; none where there is no folder."""
    return [ExperimentData.read(path) for path in sorted(folder.glob("*.json"))]


@dataclass(frozen=True, slots=True)
class SeedSpread:
    """Mean and sample standard deviation over runs; no deviation of a single one."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "SeedSpread":
        """The spread of the values that are there."""
        return cls(tuple(value for value in values if value is not None))

    @property
    def mean(self) -> float | None:
        """The mean; None of nothing."""
        return float(np.mean(self.values)) if self.values else None

    @property
    def deviation(self) -> float | None:
        """The deviation; None below two values."""
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else None

    def value(self, digits: int = 2) -> Shown | None:
        """A value of a table; None of nothing."""
        return None if self.mean is None else mean_value(self.mean, self.deviation, digits)


def by_label(data: ExperimentData) -> dict[str, list[PointData]]:
    """Points of the same workload under different seeds, in the order of the settings."""
    found: dict[str, list[PointData]] = {}
    for point in data.points:
        found.setdefault(point.label, []).append(point)
    return found


def quartiles(values: Iterable[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile."""
    low, middle, high = np.quantile(list(values), (0.25, 0.5, 0.75))
    return float(low), float(middle), float(high)


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
            raise other_settings(path, "a run with")
        return found

    def write(self, path: Path) -> None:
        """Write a file that `find` reads."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, asdict(self), indent=None)


def other_settings(path: Path, what: str) -> ConfigError:
    """The error for what was measured, in `path`, with settings that are not wanted now."""
    hint = "remove it, or name another folder with `output`"
    return ConfigError(f"{path}: {what} other settings", hint=hint)
