"""Run directories, as far as they got."""

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from pydantic import ConfigDict, TypeAdapter, ValidationError

from picbench.engines.ledger import IDLE, KINDS, Snapshot
from picbench.errors import ConfigError, InvalidRun, first_refusal
from picbench.files import parse_line
from picbench.store.manifest import FINAL, SCHEMA
from picbench.store.records import SampleRow, Tally, parse_slo
from picbench.store.summary import ArmSummary, provenance_of, summarise
from picbench.store.writer import (
    BATCHES,
    MANIFEST,
    MEMORY,
    SAMPLES,
    SUMMARY,
    WORKLOAD,
    StoredSample,
    committed_rows,
    read_batches,
    read_workload,
)

Array = npt.NDArray[np.float64]

#: Kinds of block that running requests hold.
HELD = tuple(kind for kind in KINDS if kind not in IDLE)

_MEASURE_AGAIN = "restore the file, or measure again"

_DOCUMENT = TypeAdapter(dict[str, Any])
_ARMS = TypeAdapter(dict[str, ArmSummary])
_ROWS = TypeAdapter(list[SampleRow], config=ConfigDict(extra="forbid"))


@dataclass(frozen=True, slots=True)
class Series:
    """The block ledger of one arm in one run: a value for each scheduler step.

    `time` is in seconds on the arm's own clock, `blocks` counts blocks by kind, and `pool` is how
    many there are.
    """

    time: Array
    blocks: Mapping[str, Array]
    pool: int

    @property
    def referenced(self) -> Array:
        """Blocks that running requests hold."""
        return np.asarray(self.pool - sum(self.blocks[kind] for kind in IDLE), dtype=np.float64)

    @property
    def resident(self) -> Array:
        """Blocks with KV in them, in use or idle."""
        return np.asarray(self.pool - self.blocks["free"], dtype=np.float64)

    def at_peak(self) -> dict[str, float]:
        """Blocks by kind, of the kinds that are held, when most blocks are referenced."""
        step = int(np.argmax(self.referenced))
        return {kind: float(self.blocks[kind][step]) for kind in HELD}


@dataclass(frozen=True)
class Run:
    """A run directory; everything but the manifest is read when it is first used.

    Summary and ledger of an unfinished run are those of the batches that it has. A run that was
    killed may have the manifest alone. What is missing raises ConfigError.
    """

    path: Path
    manifest: Mapping[str, Any]

    @cached_property
    def rows(self) -> Sequence[SampleRow]:
        """The rows of all arms; of an unfinished run those of whole batches."""
        with _reading(self.path / SAMPLES):
            lines = (self.path / SAMPLES).read_bytes().splitlines(keepends=True)
            if self._unfinished:
                lines = lines[: committed_rows(self.path)]
            return _rows(list(_parsed(lines)))

    @cached_property
    def workload(self) -> Mapping[str, StoredSample]:
        """What was sent, by sample."""
        with _reading(self.path / WORKLOAD):
            return read_workload(self.path / WORKLOAD)

    def samples_sent(self, samples: Container[str]) -> Mapping[str, StoredSample]:
        """What was sent for these samples, without checking that of the others."""
        with _reading(self.path / WORKLOAD):
            return read_workload(self.path / WORKLOAD, samples)

    @cached_property
    def summary(self) -> Mapping[str, ArmSummary]:
        """Aggregates by arm."""
        with _reading(self.path / SUMMARY):
            if self._unfinished:
                return self._summary_so_far()
            return _ARMS.validate_python(_document(self.path, SUMMARY)["arms"])

    @cached_property
    def ledger(self) -> Mapping[str, Series]:
        """The block ledger by arm."""
        with _reading(self.path / MEMORY):
            if self._unfinished:
                tallies = self._tallies.items()
                return {arm: _series(tally.snapshots) for arm, tally in tallies if tally.snapshots}
            return read_series(self.path / MEMORY)

    @property
    def _unfinished(self) -> bool:
        """Whether what was measured is in batches; files of an earlier attempt may be older."""
        return self.manifest.get("status") not in FINAL and (self.path / BATCHES).exists()

    @cached_property
    def _tallies(self) -> Mapping[str, Tally]:
        tallies = {arm: Tally() for arm in self.manifest["arms"]}
        for batch in read_batches(self.path):
            tallies[batch.line.arm].add(batch.rows, batch.result)
        return tallies

    def _summary_so_far(self) -> Mapping[str, ArmSummary]:
        slo = self.manifest["config"]["slo"]
        found = summarise(
            self._tallies,
            metric=self.manifest["workload"]["metric"],
            meaningful=self.manifest["model"]["meaningful"],
            objectives=parse_slo(slo) if slo else None,
        )
        arms = self.manifest["arms"]
        return {
            name: replace(arm, provenance=provenance_of(arms[name]["engine"]))
            for name, arm in found.items()
        }


def read_run(path: Path) -> Run:
    """Read a run directory.

    Raises ConfigError for what is not one, and InvalidRun for one of another schema.
    """
    with _reading(path / MANIFEST):
        manifest = _document(path, MANIFEST)
        if "status" not in manifest:
            raise KeyError("status")
        return Run(path, manifest)


def _document(path: Path, name: str) -> dict[str, Any]:
    """A manifest or a summary; raises InvalidRun for one of another schema."""
    found = _DOCUMENT.validate_json((path / name).read_bytes())
    if found["schema"] != SCHEMA:
        raise InvalidRun(
            f"{path}: written in schema {found['schema']}; this picbench reads {SCHEMA}",
            hint="repeat the run, or read it with the picbench version that its manifest names",
        )
    return found


def check_rows(run: Run) -> None:
    """Raise InvalidRun if a run's files lack rows of what it measured."""
    rows = Counter(row.arm for row in run.rows)
    for name, arm in run.summary.items():
        if rows[name] < arm.requests:
            raise InvalidRun(
                f"{run.path}: has {rows[name]} rows of {name}, and measured {arm.requests}",
                hint="restore its files, or measure anew",
            )


def read_series(path: Path) -> dict[str, Series]:
    """The series of each arm in a run's memory.parquet."""
    # Not `read_table`, which imports half a second of what only data sets of many files need.
    with path.open("rb") as opened, pq.ParquetFile(opened) as file:
        table = file.read()
    names = np.array(table["arm"].to_pylist())
    columns = {name: table[name].to_numpy() for name in ("time", "pool", *KINDS)}
    found: dict[str, Series] = {}
    for arm in dict.fromkeys(names):
        rows = names == arm
        blocks = {kind: columns[kind][rows] for kind in KINDS}
        found[str(arm)] = Series(columns["time"][rows], blocks, int(columns["pool"][rows][0]))
    return found


def _series(snapshots: Sequence[Snapshot]) -> Series:
    time = np.array([snapshot.time for snapshot in snapshots])
    blocks = {kind: np.array([s.blocks[kind] for s in snapshots]) for kind in KINDS}
    return Series(time, blocks, snapshots[0].pool)


def _rows(values: Sequence[dict[str, Any]]) -> list[SampleRow]:
    """Rows from lines of JSON; ValueError with the number of the line."""
    try:
        return _ROWS.validate_python(values)
    except ValidationError as error:
        first = first_refusal(error)
        number, *place = first.path
        raise ValueError(f"line {int(number) + 1}: {replace(first, path=tuple(place))}") from error


def _parsed(lines: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    """Lines of JSON but for a torn last one; ValueError with the number of the line."""
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            continue
        try:
            yield parse_line(line)
        except ValueError as error:
            raise ValueError(f"line {number} is no JSON") from error


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise ConfigError for what is no run, and if files of a run are not there or not whole.

    `path` is the run's directory or a file in it.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _missing(path) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = "its file was changed or damaged: restore it, or measure again"
        raise ConfigError(f"{path}: cannot be read: {_reason(error)}", hint=hint) from error


def _missing(path: Path) -> ConfigError:
    run = path.parent
    if path.name != MANIFEST:
        return ConfigError(f"{run}: the run has no {path.name}", hint=_MEASURE_AGAIN)
    lacks = "no such directory"
    if run.exists():
        lacks = f"no {MANIFEST}" if run.is_dir() else "it is a file"
    return ConfigError(f"{run}: not a run directory: {lacks}", hint="picbench run makes one")


def _reason(error: Exception) -> str:
    """What is wrong with a file, in a line."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    if isinstance(error, KeyError):
        return f"no {error}"
    if isinstance(error, ValidationError):
        return str(first_refusal(error))
    return str(error).splitlines()[0] if str(error) else type(error).__name__
