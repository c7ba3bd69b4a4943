"""What claims are held against: compact data of experiments, and scores row by row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from picbench.measure.algorithms.scored_part import Case, ScoredPart, read_parts
from picbench.papers.experiments.experiment_data import ExperimentData, read_all

#: The model that an arm without a model is one of.
BASE = "testbed"


@dataclass(frozen=True, slots=True)
class Evidence:
    """Experiments by device and name, scores by case, and where the latter are."""

    data: Mapping[tuple[str, str], ExperimentData]
    parts: Mapping[Case, ScoredPart]
    scores: str = ""

    @classmethod
    def read(cls, data: Path, scores: Path | None) -> Self:
        """Read what there is; a folder that is missing has nothing in it."""
        found = {(one.device, one.experiment): one for one in read_all(data)}
        if scores is None or not any(scores.glob("*.json")):
            return cls(found, {})
        parts = {part.case: part for part in read_parts(scores)}
        return cls(found, parts, scores.as_posix())

    def experiment(self, name: str) -> Sequence[ExperimentData]:
        """An experiment on all devices on which it was run."""
        return [data for (_, experiment), data in self.data.items() if experiment == name]

    def datasets(self, model: str = BASE) -> list[str]:
        """The data sets of which a model was scored on whole rows."""
        return list(dict.fromkeys(c.dataset for c in self.parts if c == Case(model, c.dataset)))

    def part(self, arm: str, dataset: str) -> ScoredPart | None:
        """The rows of an arm (``MODEL/ARM`` of another model); None where it has none."""
        model, _, spec = arm.rpartition("/")
        part = self.parts.get(Case(model or BASE, dataset))
        return part if part is not None and spec in part.arms else None

    def rows(self, arm: str, dataset: str) -> list[float] | None:
        """The arm's scores, row by row."""
        part = self.part(arm, dataset)
        return part.arms[arm.rpartition("/")[2]].score if part else None


def model_of(arm: str) -> str:
    """The model of an arm."""
    return arm.rpartition("/")[0] or BASE
