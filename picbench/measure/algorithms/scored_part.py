"""Scores of all arms on the rows of one data set: a file that can be continued and merged."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from picbench.errors import ConfigError, DataError
from picbench.output.json_file import write_json

SCHEMA = 1

#: Facts in which a part that is continued may differ from what runs now.
_NEUTRAL = ("gpu", "driver")


@dataclass(frozen=True, slots=True)
class Case:
    """A model and a data set; with `drop`, prompts lack the passages before those that answer.

    Of the data set's rows, the `first` ones are left out.
    """

    model: str
    dataset: str
    drop: bool = False
    first: int = 0

    @property
    def name(self) -> str:
        """The name of the case's file, without its suffix."""
        words = [file_name(self.model), self.dataset]
        words += ["drop"] if self.drop else []
        words += [f"from-{self.first}"] if self.first else []
        return "-".join(words)

    @property
    def workload(self) -> str:
        """What the cases of all data sets have in common, in words."""
        drop = ", lead passages left out" if self.drop else ""
        return f"{self.model}{drop}{f', rows from {self.first} on' if self.first else ''}"


def file_name(model: str) -> str:
    """A model's name in names of files."""
    return model.replace(":", "-").replace("/", "--")


@dataclass(slots=True)
class ArmRows:
    """What an arm did on each row, in the data set's order.

    `score` is from 0 to 1. `linked` is what the plan links (`planned_links`), `computed` what the
    engine computed of the prompt: tokens that the cache had from requests before are missing.
    """

    score: list[float] = field(default_factory=list)
    linked: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)


@dataclass(slots=True)
class ScoredPart:
    """All arms on the first rows of a case. `prompt` and `chunk` are tokens of each row.

    `wanted` is how many rows there will be, `facts` say where it was measured.
    """

    case: Case
    wanted: int
    facts: Mapping[str, Any]
    arms: dict[str, ArmRows]
    prompt: list[int] = field(default_factory=list)
    chunk: list[int] = field(default_factory=list)

    @classmethod
    def begin(cls, case: Case, wanted: int, facts: Mapping[str, Any], arms: Sequence[str]) -> Self:
        """A part without rows."""
        return cls(case, wanted, facts, {arm: ArmRows() for arm in arms})

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file that `write` wrote. Raises DataError for another one."""
        try:
            found = json.loads(path.read_bytes())
            if found["schema"] != SCHEMA:
                raise DataError(f"{path}: schema {found['schema']}, not {SCHEMA}")
            arms = {arm: ArmRows(**rows) for arm, rows in found["arms"].items()}
            return cls(
                Case(**found["case"]),
                found["wanted"],
                found["provenance"],
                arms,
                found["prompt"],
                found["chunk"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}: no scores of algorithms: {error!r}") from error

    def write(self, folder: Path) -> None:
        """Write ``NAME.json``."""
        folder.mkdir(parents=True, exist_ok=True)
        document = {
            "schema": SCHEMA,
            "provenance": dict(self.facts),
            "case": asdict(self.case),
            "wanted": self.wanted,
            "prompt": self.prompt,
            "chunk": self.chunk,
            "arms": {arm: asdict(rows) for arm, rows in self.arms.items()},
        }
        write_json(folder / f"{self.case.name}.json", document, indent=None)

    @property
    def rows(self) -> int:
        """How many rows are done."""
        return len(self.prompt)

    def check_continues(self, other: "ScoredPart") -> None:
        """Raise ConfigError unless this part can be continued with the settings of `other`."""
        same = [
            {key: value for key, value in part.facts.items() if key not in _NEUTRAL}
            for part in (self, other)
        ]
        if (self.wanted, list(self.arms), same[0]) != (other.wanted, list(other.arms), same[1]):
            raise ConfigError(
                f"`output`: {self.case.name}.json was measured with other settings",
                hint="remove it, or name another folder",
            )


def read_parts(folder: Path) -> list[ScoredPart]:
    """All parts in a folder, in the order of their names. Raises DataError if there are none."""
    found = [ScoredPart.read(path) for path in sorted(folder.glob("*.json"))]
    if not found:
        raise DataError(f"{folder}: no scores of algorithms", hint="measure them first")
    return found
