"""What an experiment measured, small enough to be kept with the sources: a JSON file."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from picbench.errors import DataError
from picbench.output.json_file import write_json
from picbench.papers.report_table import MeanCell

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

    def cell(self, digits: int = 2) -> MeanCell | None:
        """A cell of a table; None of nothing."""
        return None if self.mean is None else MeanCell(self.mean, self.deviation, digits)


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
