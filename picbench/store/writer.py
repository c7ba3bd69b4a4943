"""What a run has measured so far, batch by batch: three files that only grow.

    samples.jsonl  a line for each request
    ledger.jsonl   a line for each batch: its steps in the block ledger, until the run has ended
    batches.jsonl  a line for each batch: what else was measured of it

A batch is appended in this order, so that a line of batches.jsonl commits it: after a crash at any
moment the committed batches are whole, and what follows them in the other files is left over. Files
are flushed to the disk about once a second. A process that is killed loses nothing by that, and a
machine that stops loses the batches of that second.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from time import monotonic
from typing import Any, ClassVar

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from pydantic import TypeAdapter

from picbench.engines.chunk_cache.transfers import StepTimes
from picbench.engines.ledger import KINDS, Snapshot
from picbench.errors import ConfigError
from picbench.files import LOCK, check_place, locked_at, naming, parse_line, whole_file, write_json
from picbench.store.manifest import SCHEMA
from picbench.store.records import ArmBatch, GroupResult, SampleRow, ServerCounts
from picbench.workloads.facts import ChunkSet, chunk_id
from picbench.workloads.sample import Sample

SAMPLES = "samples.jsonl"
LEDGER = "ledger.jsonl"
BATCHES = "batches.jsonl"

#: Seconds between flushes to the disk.
INTERVAL = 1.0


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A batch of one arm, of `rows` requests; see `GroupResult` for the other fields.

    `lost` is why the arm's engine served nothing of it, None if the engine was there.
    """

    round: int
    arm: str
    rows: int
    busy_s: float
    clean: bool
    lost: str | None
    moved: Mapping[str, tuple[int, int]]
    step_times: StepTimes
    compiled: Sequence[str]
    evicted: Mapping[str, int] = field(default_factory=dict)
    counted: ServerCounts | None = None


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """The block ledger of a batch: seconds since its start and blocks by kind, step by step."""

    round: int
    arm: str
    pool: int
    time: Sequence[float]
    blocks: Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A committed batch; `result` has all but the outcomes, which are `rows`."""

    line: BatchLine
    rows: Sequence[SampleRow]
    result: GroupResult


_LINE = TypeAdapter(BatchLine)
_LEDGER_LINE = TypeAdapter(LedgerLine)
_ROW = TypeAdapter(SampleRow)
_FIELDS = tuple(known.name for known in fields(SampleRow))

#: What lines and results both have, under the same names.
_SHARED = ("clean", "moved", "step_times", "compiled", "evicted", "counted")


class BatchLog:
    """Appends batches to the files of a folder; `clock` gives seconds."""

    def __init__(self, folder: Path, clock: Callable[[], float] = monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._flushed = clock()

    def append(self, batch: ArmBatch, rows: Sequence[SampleRow]) -> None:
        """Append a batch with its rows."""
        now = self._clock()
        flush = now - self._flushed >= INTERVAL
        if flush:
            self._flushed = now
        ledger = _LEDGER_LINE.dump_json(_ledger_of(batch))
        append_rows(self._folder / SAMPLES, rows, flush=flush)
        _append(self._folder / LEDGER, ledger + b"\n", flush=flush)
        _append(self._folder / BATCHES, _LINE.dump_json(_line_of(batch)) + b"\n", flush=flush)


def append_rows(path: Path, rows: Iterable[SampleRow], *, flush: bool = True) -> None:
    """Append rows as lines of JSON, and `flush` them to the disk."""
    _append(path, _lines(rows), flush=flush)


def _lines(rows: Iterable[SampleRow]) -> bytes:
    return b"".join(_encoded(_values(row)) for row in rows)


def _encoded(values: Mapping[str, object]) -> bytes:
    """A line of JSON. Replies may have lone surrogates, which become escapes."""
    text = json.dumps(values, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "backslashreplace")


def _values(row: SampleRow) -> dict[str, object]:
    """A row as JSON values; `asdict` would copy each of them, which takes far longer."""
    values: dict[str, object] = {name: getattr(row, name) for name in _FIELDS}
    return values | {"tokens": asdict(row.tokens), "hits": asdict(row.hits)}


def write_rows(path: Path, rows: Iterable[SampleRow]) -> None:
    """Replace a file by these rows; a reader finds the old rows or the new ones."""
    with whole_file(path, durable=True) as file:
        file.write(_lines(rows))


def read_batches(folder: Path) -> list[StoredBatch]:
    """The committed batches, in order; all before the first whose lines are not whole."""
    samples, ledgers = _whole_lines(folder / SAMPLES), _whole_lines(folder / LEDGER)
    found: list[StoredBatch] = []
    start = 0
    for number, text in enumerate(_whole_lines(folder / BATCHES)):
        try:
            line = _LINE.validate_json(text)
            ledger = _LEDGER_LINE.validate_json(ledgers[number])
            rows = [
                _ROW.validate_python(parse_line(sample))
                for sample in samples[start : start + line.rows]
            ]
        except (ValueError, IndexError):
            break
        if len(rows) < line.rows:
            break
        start += line.rows
        found.append(StoredBatch(line, rows, _result_of(line, ledger)))
    return found


def committed_rows(folder: Path) -> int | None:
    """How many rows are of committed batches; None if batches are not logged."""
    if not (folder / BATCHES).exists():
        return None
    return sum(_LINE.validate_json(text).rows for text in _whole_lines(folder / BATCHES))


def cut(folder: Path, batches: Sequence[StoredBatch]) -> None:
    """Remove what follows these batches in the files."""
    rows = sum(batch.line.rows for batch in batches)
    for name, lines in ((SAMPLES, rows), (LEDGER, len(batches)), (BATCHES, len(batches))):
        path = folder / name
        if path.exists():
            os.truncate(path, sum(map(len, _whole_lines(path)[:lines])))


def _append(path: Path, lines: bytes, *, flush: bool) -> None:
    with naming(path), path.open("ab") as file:
        file.write(lines)
        if flush:
            file.flush()
            os.fsync(file.fileno())


def _whole_lines(path: Path) -> list[bytes]:
    """The lines of a file but for a torn last one; none if there is no file."""
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    return [line for line in lines if line.endswith(b"\n")]


def _line_of(batch: ArmBatch) -> BatchLine:
    shared = {name: getattr(batch.result, name) for name in _SHARED}
    busy, rows = batch.result.busy, len(batch.samples)
    return BatchLine(batch.round, batch.arm, rows, busy_s=busy, lost=batch.lost, **shared)


def _ledger_of(batch: ArmBatch) -> LedgerLine:
    steps = batch.result.snapshots
    blocks = {kind: [step.blocks[kind] for step in steps] for kind in KINDS}
    pool = steps[0].pool if steps else 0
    return LedgerLine(batch.round, batch.arm, pool, [step.time for step in steps], blocks)


def _result_of(line: BatchLine, ledger: LedgerLine) -> GroupResult:
    snapshots = tuple(
        Snapshot(step, time, ledger.pool, {kind: ledger.blocks[kind][step] for kind in KINDS})
        for step, time in enumerate(ledger.time)
    )
    shared = {name: getattr(line, name) for name in _SHARED}
    return GroupResult((), line.busy_s, snapshots, **shared | {"compiled": tuple(line.compiled)})


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkReference:
    """A segment that is a chunk of an earlier line."""

    chunk: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLine(ChunkReference):
    """A line with a chunk."""

    tokens: int
    text: str | None = None
    ids: Sequence[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSegment:
    """A segment that only this prompt has."""

    chunk: ClassVar[None] = None
    tokens: int
    text: str | None = None
    ids: Sequence[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLine:
    """A line with a sample; its chunks are on lines of their own."""

    sample: str
    dataset: str
    cluster: str
    documents: str
    answers: Sequence[str]
    max_tokens: int
    segments: Sequence[ChunkReference | TextSegment]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSample(SampleLine):
    """A sample as it was sent, with its chunks; see `ChunkSet` for `documents` and `cluster`.

    A segment has a `text`, or else the `ids` of its tokens.
    """

    segments: Sequence[ChunkLine | TextSegment]


_STORED = TypeAdapter(StoredSample)
_CHUNK = TypeAdapter(ChunkLine)


def write_workload(path: Path, samples: Iterable[Sample], sets: Mapping[str, ChunkSet]) -> None:
    """Write what `samples` send; `sets` has the chunks of each. A reader finds all or no file."""
    with whole_file(path, durable=True) as file:
        for line in _workload_lines(samples, sets):
            file.write(_encoded(line))


def read_workload(path: Path, only: Container[str] | None = None) -> dict[str, StoredSample]:
    """The samples by id, in the order of the run; OSError or ValueError for another file.

    `only` names the samples that are wanted, None for all. Nothing else is checked then, which
    reads few of many several times as fast.
    """
    chunks: dict[str, Any] = {}
    samples: dict[str, StoredSample] = {}

    def segment(value: dict[str, Any]) -> Any:
        """A segment; a chunk is checked when it is first used, and is one object from then on."""
        if "chunk" not in value:
            return value
        found = chunks[value["chunk"]]
        if not isinstance(found, ChunkLine):
            found = chunks[value["chunk"]] = _CHUNK.validate_python(found)
        return found

    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            line: dict[str, Any] = parse_line(text)
            try:
                if "sample" not in line:
                    chunks[line["chunk"]] = _CHUNK.validate_python(line) if only is None else line
                elif only is None or line["sample"] in only:
                    line["segments"] = [segment(value) for value in line["segments"]]
                    samples[line["sample"]] = _STORED.validate_python(line)
            except KeyError as error:
                raise ValueError(f"line {number}: no {error}") from error
    return samples


def _workload_lines(
    samples: Iterable[Sample], sets: Mapping[str, ChunkSet]
) -> Iterator[dict[str, Any]]:
    written: set[str] = set()
    for sample in samples:
        segments: list[dict[str, Any]] = []
        for segment in sample.segments:
            text = {"text": segment.text} if segment.text else {"ids": list(segment.tokens)}
            content = {"tokens": len(segment.tokens)} | text
            if segment.kind == "text":
                segments.append(content)
                continue
            name = chunk_id(segment)
            segments.append({"chunk": name})
            if name not in written:
                written.add(name)
                yield {"chunk": name} | content
        found = sets[sample.id]
        yield {
            "sample": sample.id,
            "dataset": sample.dataset,
            "cluster": found.cluster,
            "documents": found.documents,
            "answers": list(sample.answers),
            "max_tokens": sample.max_tokens,
            "segments": segments,
        }


MANIFEST = "manifest.json"
WORKLOAD = "workload.jsonl"
MEMORY = "memory.parquet"
SUMMARY = "summary.json"

#: What a run writes before its manifest.
_EARLY = ("logs", WORKLOAD, LOCK)
_EARLY_DRAFTS = re.compile(rf"\.({re.escape(WORKLOAD)}|{re.escape(MANIFEST)})\.(\d+\.)?tmp")


class RunDirectory:
    """A directory that one run writes; `discard` removes all that `create` made."""

    def __init__(self, path: Path, made: tuple[Path, ...] = ()) -> None:
        self.path = path
        self._made = made
        self._log = BatchLog(path)

    @classmethod
    def create(cls, path: Path) -> "RunDirectory":
        """Make the directory, or take a free one; raises ConfigError if that cannot be."""
        check_free(path)
        missing = tuple(p for p in (path, *path.parents) if not p.exists())
        try:
            (path / "logs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(path, error) from error
        return cls(path, missing)

    @property
    def begun(self) -> bool:
        """Whether a manifest was written."""
        return (self.path / MANIFEST).exists()

    def log(self, arm: str) -> Path:
        """Where the output of an arm's engine goes."""
        return self.path / "logs" / log_name(arm)

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Write or replace the manifest."""
        write_json(self.path / MANIFEST, {"schema": SCHEMA} | dict(manifest))

    def write_workload(self, samples: Sequence[Sample], sets: Mapping[str, ChunkSet]) -> None:
        """Write what is sent."""
        write_workload(self.path / WORKLOAD, samples, sets)

    def append(self, rows: Iterable[SampleRow]) -> None:
        """Append rows and flush them to the disk."""
        append_rows(self.path / SAMPLES, rows)

    def keep(self, batch: ArmBatch, rows: Sequence[SampleRow]) -> None:
        """Append a batch with its rows, all of it or, after a crash, nothing."""
        self._log.append(batch, rows)

    def write_memory(self, ledgers: Mapping[str, Iterable[Snapshot]]) -> None:
        """Write the ledgers of all arms, column by column: rows would take what ledgers take."""
        path = self.path / MEMORY
        # Arrow takes the names of files for UTF-8, which they are not in every locale.
        with whole_file(path) as file, pq.ParquetWriter(file, _memory_schema()) as writer:
            for arm, snapshots in ledgers.items():
                writer.write_table(_memory_table(arm, list(snapshots)))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write or replace the summary."""
        write_json(self.path / SUMMARY, summary)

    def compact(self) -> None:
        """Remove what only a run that is resumed needs."""
        (self.path / LEDGER).unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove what was written, and the folders that were made for it."""
        for entry in self.path.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        with suppress(OSError):
            for folder in self._made:
                folder.rmdir()


def log_name(arm: str) -> str:
    """The file name of an arm's log."""
    return f"{re.sub(r'[^A-Za-z0-9=_.-]', '_', arm)}.log"


def check_free(path: Path) -> None:
    """Raise ConfigError unless a run may be written to `path`: a new or an empty directory.

    The directory of a run that was killed before it had a manifest counts as empty.
    """
    try:
        check_place(path)
        taken = path.exists() and (
            not path.is_dir() or not all(_is_early(entry.name) for entry in path.iterdir())
        )
    except OSError as error:
        raise _unwritable(path, error) from error
    if taken:
        raise ConfigError(f"`output` {path}: exists and is not empty", hint="name a new folder")


def _is_early(name: str) -> bool:
    return name in _EARLY or _EARLY_DRAFTS.fullmatch(name) is not None


def _memory_schema() -> pa.Schema:
    head = {"arm": pa.string(), "step": pa.int64(), "time": pa.float64(), "pool": pa.int64()}
    return pa.schema(list((head | dict.fromkeys(KINDS, pa.float64())).items()))


def _memory_table(arm: str, snapshots: Sequence[Snapshot]) -> pa.Table:
    columns = {
        "arm": [arm] * len(snapshots),
        **{name: [getattr(s, name) for s in snapshots] for name in ("step", "time", "pool")},
        **{kind: [s.blocks[kind] for s in snapshots] for kind in KINDS},
    }
    return pa.Table.from_pydict(columns, schema=_memory_schema())


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"`output` {path}: cannot be written: {error.strerror}", hint="name another folder"
    )


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Hold a folder; raises ConfigError where another process, or this one already, does."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked_at(folder / LOCK, timeout=0))
        except TimeoutError as error:
            raise ConfigError(
                f"`output` {folder}: another process is writing this run",
                hint="wait until it has ended, or name another folder",
            ) from error
        yield


def is_held(folder: Path) -> bool:
    """Whether a process holds a folder."""
    try:
        with hold(folder):
            return False
    except ConfigError:
        return True
