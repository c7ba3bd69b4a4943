"""A table that is written as Markdown, CSV and JSON."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from json import loads
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from picbench.errors import ConfigError, DataError
from picbench.files import write_json
from picbench.papers.settings import Point
from picbench.tables.table import Column, Shown, Table, Value

if TYPE_CHECKING:
    pass

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


@dataclass(frozen=True, slots=True)
class OccupancySeries:
    """Blocks that running requests held, in percent of the pool, over seconds."""

    time: list[float]
    share: list[float]


@dataclass(frozen=True, slots=True)
class PointArm:
    """An arm at a point: `metrics` by name, None where nothing could be measured.

    `at_peak` are the blocks that were held when most were, by kind; empty without a ledger.
    """

    metrics: Mapping[str, float | None]
    at_peak: Mapping[str, float] = field(default_factory=dict)
    series: OccupancySeries | None = None


@dataclass(frozen=True, slots=True)
class PointData:
    """A point of an experiment under a seed, or in a repeat; `facts` are those of its requests."""

    label: str
    seed: int
    facts: Mapping[str, float | None]
    arms: Mapping[str, PointArm]


@dataclass(frozen=True, slots=True)
class ExperimentData:
    """All points of an experiment on a device. `conditions` say what ran where."""

    paper: str
    experiment: str
    device: str
    varies: str
    conditions: Mapping[str, Any]
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
        return str(self.conditions.get("repeats", "seeds"))

    @property
    def caption(self) -> str:
        """What ran where, in a sentence."""
        return str(self.conditions["caption"])

    @property
    def weights(self) -> str:
        """A few words about the model for figures: which, and what its weights are."""
        return str(self.conditions["model"])

    @property
    def hardware(self) -> str:
        """A few words about the machine."""
        return str(self.conditions["hardware"])

    def write(self, folder: Path) -> None:
        """Write ``DEVICE-EXPERIMENT.json``, a line of JSON a point."""
        folder.mkdir(parents=True, exist_ok=True)
        head = {
            "schema": SCHEMA,
            "paper": self.paper,
            "experiment": self.experiment,
            "device": self.device,
            "varies": self.varies,
            "conditions": dict(self.conditions),
        }
        rows = [asdict(point) for point in self.points]
        write_json(folder / f"{self.name}.json", head | {"points": rows}, indent=None)

    @classmethod
    def read(cls, path: Path) -> "ExperimentData":
        """Read a file that `write` wrote. Raises DataError for another one."""
        try:
            found = json.loads(path.read_bytes())
            if found["schema"] != SCHEMA:
                raise DataError(f"{path}: schema {found['schema']}, not {SCHEMA}")
            points = [read_point(row) for row in found["points"]]
            return cls(
                found["paper"],
                found["experiment"],
                found["device"],
                found["varies"],
                found["conditions"],
                points,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}: not an experiment's data: {error!r}") from error


def read_point(row: Mapping[str, Any]) -> PointData:
    """A point from what `asdict` made of it."""
    arms = {
        name: PointArm(
            arm["metrics"],
            arm["at_peak"],
            OccupancySeries(**arm["series"]) if arm["series"] else None,
        )
        for name, arm in row["arms"].items()
    }
    return PointData(row["label"], row["seed"], row["facts"], arms)


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


def short(values: Iterable[float], digits: int) -> Iterator[float]:
    """Rounded, for files."""
    return (round(float(value), digits) for value in values)


@dataclass(frozen=True, slots=True)
class StoredPoint:
    """A point, what says that it is the wanted one, and what ran where."""

    identity: Mapping[str, Any]
    conditions: Mapping[str, Any]
    point: PointData

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file that a PointStore wrote. Raises DataError for another one."""
        try:
            found = loads(path.read_bytes())
            return cls(found["identity"], found["conditions"], read_point(found["point"]))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}: not a measured point: {error!r}") from error


@dataclass(frozen=True, slots=True)
class PointStore:
    """The points below a folder, by name."""

    folder: Path

    def has(self, name: str) -> bool:
        """Whether there is a point of that name, with whatever settings."""
        return self._path(name).exists()

    def find(self, name: str, identity: Mapping[str, Any]) -> StoredPoint | None:
        """The point; None where there is none. ConfigError for one with other settings."""
        if not self.has(name):
            return None
        found = StoredPoint.read(self._path(name))
        if dict(found.identity) != dict(identity):
            raise ConfigError(
                f"{self._path(name)}: a run with other settings",
                hint="remove it, or name another folder with `output`",
            )
        return found

    def keep(self, name: str, found: StoredPoint) -> None:
        """Write a point."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self._path(name), asdict(found), indent=None)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"
