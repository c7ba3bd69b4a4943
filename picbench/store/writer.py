"""What a run writes: its documents, the requests that it sent, and what it has measured so far.

Three files only grow, batch by batch:

    samples.jsonl  a line for each request
    ledger.jsonl   a line for each batch: its steps in the block ledger, until the run has ended
    batches.jsonl  a line for each batch: what else was measured of it

A batch is appended in this order, so that a line of batches.jsonl commits it: after a crash at any
moment the committed batches are whole, and what follows them in the other files is left over. Files
are flushed to the disk about once a second. A process that is killed loses nothing by that, and a
machine that stops loses the batches of that second.

``python -m picbench.store.writer FOLDER`` writes the JSON Schemas of all files.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import TypeAdapter

from picbench.engines.chunk_cache.transfers import StepTimes
from picbench.engines.ledger import KINDS, Snapshot
from picbench.errors import ConfigError
from picbench.files import LOCK, check_place, locked_at, naming, parse_line, whole_file, write_json
from picbench.store.records import ArmBatch, GroupResult, SampleRow, ServerCounts, Sizes
from picbench.store.summary import ArmSummary
from picbench.workloads.facts import ChunkSet, WorkloadFacts, chunk_id
from picbench.workloads.sample import Sample
from picbench.workloads.sources.hub import Origin

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]

MANIFEST = "manifest.json"
SUMMARY = "summary.json"
WORKLOAD = "workload.jsonl"
MEMORY = "memory.parquet"
SAMPLES = "samples.jsonl"
LEDGER = "ledger.jsonl"
BATCHES = "batches.jsonl"

#: The version of all files of a run directory. It changes when a field changes its meaning or is
#: no longer written, and when one is added that readers rely on.
SCHEMA = 3

#: How far a run is. `running` stays if a run was killed. `complete`, `partial` (requests failed)
#: and `invalid` (its numbers mean nothing) are final; after `interrupted` and `failed` the same
#: command resumes.
Status = Literal["running", "complete", "partial", "interrupted", "failed", "invalid"]

#: The ends after which a run is not resumed.
FINAL = ("complete", "partial", "invalid")


@dataclass(frozen=True, slots=True)
class ModelDocument:
    """The model: its name, its kind of weights, and whether scores with these mean something.

    `restates` marks the testbed model, whose replies restate facts before the answer.
    """

    name: str
    weights: str
    meaningful: bool
    restates: bool = False


@dataclass(frozen=True, slots=True)
class ArrivalDocument:
    """An open loop: so many requests, the last of them after `last_s` seconds."""

    requests: int
    last_s: float


@dataclass(frozen=True, slots=True)
class WorkloadDocument(WorkloadFacts):
    """The facts about the requests, and how they are sent.

    `metric` is how replies are scored. `arrivals` is None in a closed loop, `request_file` the
    fingerprint of a replayed file.
    """

    metric: str | None
    synthetic: bool
    arrivals: ArrivalDocument | None
    preloaded_chunks: int
    request_file: str | None
    origin: Origin | None
    chat: bool
    skipped_rows: int
    first_skipped: str | None


@dataclass(frozen=True, slots=True)
class ArmDocument:
    """An arm: its algorithm, the settings of its engine, and what the engine says it is."""

    algorithm: str
    stock: bool
    settings: Mapping[str, Any]
    engine: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One process that worked on a run; times are UTC in ISO 8601.

    It began after `done` requests of all arms together. To have its caches as they were then, it
    served `replayed` of these again without measuring them; `changed_outputs` of them got another
    reply than the first time. `status` is "running" if it was killed.
    """

    began: str
    ended: str | None = None
    status: Status = "running"
    done: int = 0
    replayed: int = 0
    changed_outputs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Document:
    """What both documents of a run say of it; `provenance` has versions, hardware and code."""

    schema: int
    status: Status
    fingerprint: str
    model: ModelDocument
    workload: WorkloadDocument
    provenance: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(_Document):
    """manifest.json: what was asked for and on what it ran.

    `reason` says why a run is invalid or failed, `config` has the settings of `picbench run`.
    """

    began: str
    ended: str | None
    reason: str | None
    attempts: Sequence[Attempt]
    config: Mapping[str, Any]
    sizes: Sizes
    cache: str
    arms: Mapping[str, ArmDocument]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary(_Document):
    """summary.json: aggregates by arm."""

    arms: Mapping[str, ArmSummary]


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

#: Seconds between flushes to the disk.
INTERVAL = 1.0


class RunDirectory:
    """A directory that one run writes; `discard` removes all that `create` made."""

    def __init__(self, path: Path, made: Sequence[Path] = ()) -> None:
        self.path = path
        self._made = made
        self._flushed = monotonic()

    @classmethod
    def create(cls, path: Path) -> "RunDirectory":
        """Make the directory, or take a free one; raises ConfigError if that cannot be."""
        check_free(path)
        missing = [p for p in (path, *path.parents) if not p.exists()]
        try:
            (path / "logs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(path, error) from error
        return cls(path, missing)

    def write(self, name: str, document: Mapping[str, Any]) -> None:
        """Write or replace a document, `MANIFEST` or `SUMMARY`."""
        write_json(self.path / name, document)

    def write_workload(self, samples: Iterable[Sample], sets: Mapping[str, ChunkSet]) -> None:
        """Write what is sent, each chunk before its first sample; `sets` are chunks by sample."""
        written: set[str] = set()
        with whole_file(self.path / WORKLOAD, durable=True) as file:
            for sample in samples:
                segments: list[dict[str, Any]] = []
                for segment in sample.segments:
                    content: dict[str, Any] = {"tokens": len(segment.tokens)}
                    content |= {"text": segment.text} if segment.text else {"ids": segment.tokens}
                    if segment.kind == "text":
                        segments.append(content)
                        continue
                    chunk = {"chunk": chunk_id(segment)}
                    segments.append(chunk)
                    if chunk["chunk"] not in written:
                        written.add(chunk["chunk"])
                        file.write(_encoded(chunk | content))
                line = {
                    "sample": sample.id,
                    "dataset": sample.dataset,
                    "cluster": sets[sample.id].cluster,
                    "documents": sets[sample.id].documents,
                    "answers": sample.answers,
                    "max_tokens": sample.max_tokens,
                    "segments": segments,
                }
                file.write(_encoded(line))

    def write_memory(self, ledgers: Mapping[str, Sequence[Snapshot]]) -> None:
        """Write the ledgers of all arms, column by column: rows would take what ledgers take."""
        import pyarrow.parquet as pq  # type: ignore[import-untyped]

        # Arrow takes the names of files for UTF-8, which they are not in every locale.
        schema = memory_table("", ()).schema
        with whole_file(self.path / MEMORY) as file, pq.ParquetWriter(file, schema) as writer:
            for arm, steps in ledgers.items():
                writer.write_table(memory_table(arm, steps))

    def append(self, rows: Iterable[SampleRow], *, flush: bool = True) -> None:
        """Append rows that no batch commits."""
        _append(self.path / SAMPLES, _lines(rows), flush=flush)

    def keep(self, batch: ArmBatch, rows: Sequence[SampleRow]) -> None:
        """Append a batch with its rows, all of it or, after a crash, nothing."""
        now, result = monotonic(), batch.result
        flush = now - self._flushed >= INTERVAL
        if flush:
            self._flushed = now
        steps = result.snapshots
        blocks = {kind: [step.blocks[kind] for step in steps] for kind in KINDS}
        pool = steps[0].pool if steps else 0
        ledger = LedgerLine(batch.round, batch.arm, pool, [step.time for step in steps], blocks)
        line = BatchLine(
            batch.round,
            batch.arm,
            len(batch.samples),
            result.busy,
            lost=batch.lost,
            **{name: getattr(result, name) for name in _SHARED},
        )
        self.append(rows, flush=flush)
        _append(self.path / LEDGER, _LEDGER_LINE.dump_json(ledger) + b"\n", flush=flush)
        _append(self.path / BATCHES, _LINE.dump_json(line) + b"\n", flush=flush)

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


def memory_table(arm: str, steps: Sequence[Snapshot]) -> "pa.Table":
    """What memory.parquet has of an arm."""
    import pyarrow as pa

    head = {"arm": pa.string(), "step": pa.int64(), "time": pa.float64(), "pool": pa.int64()}
    schema = pa.schema(list((head | dict.fromkeys(KINDS, pa.float64())).items()))
    columns: dict[str, list[Any]] = {"arm": [arm] * len(steps)}
    columns |= {name: [getattr(s, name) for s in steps] for name in ("step", "time", "pool")}
    columns |= {kind: [step.blocks[kind] for step in steps] for kind in KINDS}
    return pa.Table.from_pydict(columns, schema=schema)


def log_name(arm: str) -> str:
    """The file name of an arm's log."""
    return f"{re.sub(r'[^A-Za-z0-9=_.-]', '_', arm)}.log"


def write_rows(path: Path, rows: Iterable[SampleRow]) -> None:
    """Replace a file by these rows; a reader finds the old rows or the new ones."""
    with whole_file(path, durable=True) as file:
        file.write(_lines(rows))


def _append(path: Path, lines: bytes, *, flush: bool) -> None:
    with naming(path), path.open("ab") as file:
        file.write(lines)
        if flush:
            file.flush()
            os.fsync(file.fileno())


def _lines(rows: Iterable[SampleRow]) -> bytes:
    # Not `asdict` of all, which copies each value and takes far longer.
    values = ({name: getattr(row, name) for name in _FIELDS} for row in rows)
    return b"".join(
        _encoded(row | {n: asdict(row[n]) for n in ("tokens", "hits", "choice") if row[n]})
        for row in values
    )


def _encoded(values: Mapping[str, object]) -> bytes:
    """A line of JSON. Replies may have lone surrogates, which become escapes."""
    text = json.dumps(values, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "backslashreplace")


def read_batches(folder: Path) -> list[StoredBatch]:
    """The committed batches, in order; all before the first whose lines are not whole."""
    samples, ledgers = _whole_lines(folder / SAMPLES), _whole_lines(folder / LEDGER)
    found: list[StoredBatch] = []
    start = 0
    for number, text in enumerate(_whole_lines(folder / BATCHES)):
        try:
            line = _LINE.validate_json(text)
            ledger = _LEDGER_LINE.validate_json(ledgers[number])
            own = samples[start : start + line.rows]
            rows = [_ROW.validate_python(parse_line(sample)) for sample in own]
        except (ValueError, IndexError):
            break
        if len(rows) < line.rows:
            break
        start += line.rows
        snapshots = tuple(
            Snapshot(step, time, ledger.pool, {kind: ledger.blocks[kind][step] for kind in KINDS})
            for step, time in enumerate(ledger.time)
        )
        shared = {name: getattr(line, name) for name in _SHARED}
        shared["compiled"] = tuple(line.compiled)
        found.append(StoredBatch(line, rows, GroupResult((), line.busy_s, snapshots, **shared)))
    return found


def cut(folder: Path, batches: Sequence[StoredBatch]) -> None:
    """Remove what follows these batches in the files."""
    rows = sum(batch.line.rows for batch in batches)
    for name, lines in ((SAMPLES, rows), (LEDGER, len(batches)), (BATCHES, len(batches))):
        path = folder / name
        if path.exists():
            os.truncate(path, sum(map(len, _whole_lines(path)[:lines])))


def _whole_lines(path: Path) -> list[bytes]:
    """The lines of a file but for a torn last one; none if there is no file."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if line.endswith(b"\n")]


#: What a run writes before its manifest.
_EARLY = re.compile(r"logs|\.lock|workload\.jsonl|\.(workload\.jsonl|manifest\.json)\.(\d+\.)?tmp")


def check_free(path: Path, wanted: str = "empty") -> None:
    """Raise ConfigError unless a run may be written to `path`: a new or an empty directory.

    The directory of a run that was killed before it had a manifest counts as empty. `wanted` is
    what a directory may be.
    """
    try:
        check_place(path)
        taken = path.exists() and (
            not path.is_dir() or not all(_EARLY.fullmatch(entry.name) for entry in path.iterdir())
        )
    except OSError as error:
        raise _unwritable(path, error) from error
    if taken:
        raise ConfigError(f"`output` {path}: exists and is not {wanted}", hint="name a new folder")


def _unwritable(path: Path, error: OSError) -> ConfigError:
    what = f"`output` {path}: cannot be written: {error.strerror}"
    return ConfigError(what, hint="name another folder")


def hold(folder: Path) -> AbstractContextManager[None]:
    """Hold a folder; raises ConfigError where another process, or this one already, does."""
    taken = ConfigError(
        f"`output` {folder}: another process is writing this run",
        hint="wait until it has ended, or name another folder",
    )
    return locked_at(folder / LOCK, taken)


def is_held(folder: Path) -> bool:
    """Whether a process holds a folder."""
    try:
        with hold(folder):
            return False
    except ConfigError:
        return True


def json_schemas() -> dict[str, dict[str, Any]]:
    """The JSON Schemas by file of the run directory; of a .jsonl file the schema of its lines."""
    kinds: dict[str, Any] = {
        MANIFEST: Manifest,
        SUMMARY: Summary,
        SAMPLES: SampleRow,
        BATCHES: BatchLine,
        LEDGER: LedgerLine,
        WORKLOAD: ChunkLine | SampleLine,
    }
    found = {}
    for name, kind in kinds.items():
        schema = TypeAdapter(kind).json_schema()
        for part in (schema, *schema.get("$defs", {}).values()):
            if "properties" in part:
                part["additionalProperties"] = False
                if name != WORKLOAD:  # Only there other fields may be left out.
                    part["required"] = list(part["properties"])
        head = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
        found[name] = head | schema | {"title": f"{name} of a picbench run, schema {SCHEMA}"}
    return found


def schema_name(file: str) -> str:
    """The name of the schema's file, such as ``manifest-2.schema.json``."""
    return f"{Path(file).stem}-{SCHEMA}.schema.json"


if __name__ == "__main__":
    for name, schema in json_schemas().items():
        write_json(Path(sys.argv[1]) / schema_name(name), schema)
