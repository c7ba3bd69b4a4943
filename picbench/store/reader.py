"""Run directories, as far as they got."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from picbench.engines.ledger import IDLE, KINDS
from picbench.errors import ConfigError, InvalidRun, first_refusal
from picbench.files import parse_line
from picbench.store import writer
from picbench.store.records import SampleRow, Tally, parse_slo
from picbench.store.summary import ArmSummary, summarise

if TYPE_CHECKING:
    import pandas as pd

#: Kinds of block that running requests hold.
HELD = tuple(kind for kind in KINDS if kind not in IDLE)

_ROWS = TypeAdapter(list[SampleRow], config=ConfigDict(extra="forbid"))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSample(writer.SampleLine):
    """A sample as it was sent, with its chunks; see `ChunkSet` for `documents` and `cluster`.

    A segment has a `text`, or else the `ids` of its tokens.
    """

    segments: Sequence[writer.ChunkLine | writer.TextSegment]


@dataclass(frozen=True)
class Run:
    """A run directory; everything but the manifest is read when it is first used.

    Of an unfinished run rows, summary and ledger are those of the batches that it has. A run that
    was killed may have the manifest alone. What is missing raises ConfigError.
    """

    path: Path
    manifest: Mapping[str, Any]

    @cached_property
    def rows(self) -> Sequence[SampleRow]:
        """The rows of all arms, in the order in which they were served."""
        with _reading(self.path / writer.SAMPLES) as path:
            if self._batches is not None:
                return [row for batch in self._batches for row in batch.rows]
            return _read_rows(path)

    @cached_property
    def workload(self) -> Mapping[str, StoredSample]:
        """What was sent, by sample."""
        with _reading(self.path / writer.WORKLOAD) as path:
            return read_workload(path)

    @cached_property
    def summary(self) -> Mapping[str, ArmSummary]:
        """Aggregates by arm."""
        with _reading(self.path / writer.SUMMARY) as path:
            if self._batches is None:
                return TypeAdapter(dict[str, ArmSummary]).validate_python(_document(path)["arms"])
            slo = self.manifest["config"]["slo"]
            return summarise(
                self._tallies,
                metric=self.manifest["workload"]["metric"],
                meaningful=self.manifest["model"]["meaningful"],
                objectives=parse_slo(slo) if slo else None,
                engines={name: arm["engine"] for name, arm in self.manifest["arms"].items()},
            )

    @cached_property
    def ledger(self) -> "pd.DataFrame":
        """The block ledger: arm, step, time in seconds, pool and blocks of each kind.

        `referenced` has the blocks that running requests hold. Times are on the arm's own clock.
        """
        import pyarrow as pa  # type: ignore[import-untyped]  # 150 MB, which no other file needs.
        import pyarrow.parquet as pq  # type: ignore[import-untyped]

        with _reading(self.path / writer.MEMORY) as path:
            if self._batches is None:
                # Not `read_table`, which imports half a second of what only data sets need.
                with path.open("rb") as opened, pq.ParquetFile(opened) as file:
                    table = file.read()
            else:
                tallies = self._tallies.items()
                table = pa.concat_tables(
                    writer.memory_table(arm, tally.snapshots) for arm, tally in tallies
                )
            frame = table.to_pandas()
            return frame.assign(referenced=frame["pool"] - frame[list(IDLE)].sum(axis=1))

    @cached_property
    def _batches(self) -> Sequence[writer.StoredBatch] | None:
        """Committed batches; None of a run that has ended, or has none."""
        ended = self.manifest.get("status") in writer.FINAL
        begun = (self.path / writer.BATCHES).exists()
        return writer.read_batches(self.path) if begun and not ended else None

    @cached_property
    def _tallies(self) -> Mapping[str, Tally]:
        tallies = {arm: Tally() for arm in self.manifest["arms"]}
        for batch in self._batches or ():
            tallies[batch.line.arm].add(batch.rows, batch.result)
        return tallies


def read_run(path: Path) -> Run:
    """Read a run directory.

    Raises ConfigError for what is not one, and InvalidRun for one of another schema.
    """
    with _reading(path / writer.MANIFEST) as file:
        manifest = _document(file)
        if "status" not in manifest:
            raise KeyError("status")
        return Run(path, manifest)


def _document(path: Path) -> dict[str, Any]:
    """A manifest or a summary; raises InvalidRun for one of another schema."""
    found = TypeAdapter(dict[str, Any]).validate_json(path.read_bytes())
    if found["schema"] != writer.SCHEMA:
        raise InvalidRun(
            f"{path.parent}: written in schema {found['schema']}; "
            f"this picbench reads {writer.SCHEMA}",
            hint="repeat the run, or read it with the picbench version that its manifest names",
        )
    return found


def check_rows(run: Run) -> None:
    """Raise InvalidRun if a run's files lack rows of what it measured, or have more."""
    rows = Counter(row.arm for row in run.rows)
    measured = Counter({name: arm.requests for name, arm in run.summary.items()})
    for name in rows | measured:
        if rows[name] != measured[name]:
            raise InvalidRun(
                f"{run.path}: has {rows[name]} rows of {name}, and measured {measured[name]}",
                hint="restore its files, or measure anew",
            )


def read_workload(path: Path) -> dict[str, StoredSample]:
    """The samples by id, in the order of the run; OSError or ValueError for another file."""
    chunk_line, stored = TypeAdapter(writer.ChunkLine), TypeAdapter(StoredSample)
    chunks: dict[str, writer.ChunkLine] = {}
    samples: dict[str, StoredSample] = {}
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            line = parse_line(text)
            try:
                if "sample" in line:
                    segments = [chunks[s["chunk"]] if "chunk" in s else s for s in line["segments"]]
                    samples[line["sample"]] = stored.validate_python(line | {"segments": segments})
                else:
                    chunks[line["chunk"]] = chunk_line.validate_python(line)
            except KeyError as error:
                raise ValueError(f"line {number}: no {error}") from error
    return samples


def _read_rows(path: Path) -> list[SampleRow]:
    """The rows but for a torn last one; ValueError with the number of the line."""
    values: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        try:
            if line.endswith(b"\n"):
                values.append(parse_line(line))
        except ValueError as error:
            raise ValueError(f"line {number} is no JSON") from error
    try:
        return _ROWS.validate_python(values)
    except ValidationError as error:
        first = first_refusal(error)
        index, *place = first.path
        raise ValueError(f"line {int(index) + 1}: {replace(first, path=tuple(place))}") from error


@contextmanager
def _reading(path: Path) -> Iterator[Path]:
    """Give a file of a run; raise ConfigError if it is not there or not whole."""
    run = path.parent
    try:
        yield path
    except (FileNotFoundError, NotADirectoryError) as error:
        if path.name != writer.MANIFEST:
            hint = "restore the file, or measure again"
            raise ConfigError(f"{run}: the run has no {path.name}", hint=hint) from error
        lacks = f"no {path.name}" if run.is_dir() else "it is a file"
        lacks = lacks if run.exists() else "no such directory"
        raise ConfigError(
            f"{run}: not a run directory: {lacks}", hint="picbench run makes one"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        if isinstance(error, OSError):
            reason = error.strerror or type(error).__name__
        elif isinstance(error, KeyError):
            reason = f"no {error}"
        elif isinstance(error, ValidationError):
            reason = str(first_refusal(error))
        hint = "its file was changed or damaged: restore it, or measure again"
        raise ConfigError(f"{path}: cannot be read: {reason}", hint=hint) from error
