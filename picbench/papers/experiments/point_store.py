"""Points of loads that were measured, a small file each, which outlive their run directories."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from json import loads
from pathlib import Path
from typing import Any, Self

from picbench.errors import ConfigError, DataError
from picbench.output.json_file import write_json
from picbench.papers.experiments.experiment_data import PointData, read_point


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
