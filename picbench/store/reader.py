"""Files of older runs, as they would be written today: of the version before, and no older.

A reader knows two versions, so that results outlive one change of format. All functions take and
return JSON values.
"""

import gc
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

Json = dict[str, Any]


def version_of(path: Path, document: Mapping[str, Any]) -> int:
    """The version of a manifest or a summary in `path`.

    InvalidRun for one that this picbench does not read, KeyError where none is given.
    """
    version: int = document["schema"]
    if version not in (SCHEMA - 1, SCHEMA):
        raise InvalidRun(
            f"{path}: written in schema {version}; this picbench reads {SCHEMA - 1} and {SCHEMA}",
            hint="repeat the run, or read it with the picbench version that its manifest names",
        )
    return version


def migrate_manifest(path: Path, document: Json) -> Json:
    """A manifest in today's schema."""
    if version_of(path, document) == SCHEMA:
        return document
    attempt = {"began": document["began"], "ended": document["ended"], "status": document["status"]}
    counts = {"done": 0, "replayed": 0, "changed_outputs": 0}
    new = {"schema": SCHEMA, "reason": None, "attempts": [attempt | counts]}
    return document | new | _named(document)


def migrate_summary(path: Path, document: Json) -> Json:
    """A summary in today's schema; what older runs did not count is missing in it."""
    if version_of(path, document) == SCHEMA:
        return document
    return document | {"schema": SCHEMA} | _named(document)


def migrate_row(version: int, row: Json) -> Json:
    """A row in today's schema; nothing is known of abstentions and of shared chunks."""
    if version == SCHEMA:
        return row
    return {"outcome": "answered" if row["error"] is None else "error"} | row


def _named(document: Json) -> Json:
    """What both files have of the model and the workload."""
    restates = document["model"]["name"].startswith("testbed")
    return {
        "model": document["model"] | {"restates": restates},
        "workload": document["workload"] | {"metric": None},
    }


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

    Summary and ledger of an unfinished run are those of the batches that it has.

    Files of the schema before are read as if they were written today; `schema` is the one that they
    were written in. A run that was killed may have the manifest alone. What is missing raises
    ConfigError.
    """

    path: Path
    manifest: Mapping[str, Any]
    schema: int = SCHEMA

    @cached_property
    def rows(self) -> Sequence[SampleRow]:
        """The rows of all arms; of an unfinished run those of whole batches."""
        with _reading(self.path / SAMPLES):
            lines = (self.path / SAMPLES).read_bytes().splitlines(keepends=True)
            if self._unfinished:
                lines = lines[: committed_rows(self.path)]
            with _uncollected():
                return _rows([migrate_row(self.schema, row) for row in _parsed(lines)])

    @cached_property
    def workload(self) -> Mapping[str, StoredSample]:
        """What was sent, by sample; runs of schema 1 do not have it."""
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
            found = _DOCUMENT.validate_json((self.path / SUMMARY).read_bytes())
            document = migrate_summary(self.path, found)
            return _ARMS.validate_python(document["arms"])

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
        engines = {name: arm["engine"] for name, arm in self.manifest["arms"].items()}
        return {
            name: replace(arm, provenance=provenance_of(engines[name]))
            for name, arm in found.items()
        }


def read_run(path: Path) -> Run:
    """Read a run directory.

    Raises ConfigError for what is not one, and InvalidRun for one of an unknown schema.
    """
    with _reading(path / MANIFEST):
        found = _DOCUMENT.validate_json((path / MANIFEST).read_bytes())
        manifest = migrate_manifest(path, found)
        if "status" not in manifest:
            raise KeyError("status")
        return Run(path, manifest, found["schema"])


def check_rows(run: Run) -> None:
    """Raise InvalidRun for a run whose files lack rows of what it measured."""
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
    return Series(
        time=np.array([snapshot.time for snapshot in snapshots]),
        blocks={kind: np.array([s.blocks[kind] for s in snapshots]) for kind in KINDS},
        pool=snapshots[0].pool,
    )


def _rows(values: Sequence[dict[str, Any]]) -> list[SampleRow]:
    """Rows from lines of JSON; ValueError with the number of the line."""
    try:
        return _ROWS.validate_python(values)
    except ValidationError as error:
        first = first_refusal(error)
        number, *place = first.path
        of_row = replace(first, path=tuple(place))
        raise ValueError(f"line {int(number) + 1}: {of_row}") from error


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
def _uncollected() -> Iterator[None]:
    """Keep the garbage collector from going over objects that stay, again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """ConfigError for what is no run, and for files of a run that are not there or not whole.

    `path` is the run's directory or a file in it.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _missing(path) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: cannot be read: {_reason(error)}",
            hint="its file was changed or damaged: restore it, or measure again",
        ) from error


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
