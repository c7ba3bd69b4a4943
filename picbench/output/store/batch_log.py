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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from time import monotonic

from pydantic import TypeAdapter

from picbench.arms.messages import GroupResult, ServerCounts
from picbench.engines.chunk_cache.transfers import StepTimes
from picbench.engines.ledger import KINDS, Snapshot
from picbench.output.json_file import parse_line
from picbench.output.sample_row import SampleRow
from picbench.run.protocol import ArmBatch
from picbench.whole_files import naming, whole_file

SAMPLES = "samples.jsonl"
LEDGER = "ledger.jsonl"
BATCHES = "batches.jsonl"

#: Seconds between flushes to the disk.
INTERVAL = 1.0


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A batch of one arm, of `rows` requests; see `GroupResult` for the other fields.

    `lost` is why the arm's engine served none of it, None where the engine was there.
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

    def snapshots(self) -> tuple[Snapshot, ...]:
        """The ledger as it was measured."""
        return tuple(
            Snapshot(step, time, self.pool, {kind: self.blocks[kind][step] for kind in KINDS})
            for step, time in enumerate(self.time)
        )


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A committed batch; `result` has everything of it but the outcomes, which are `rows`."""

    line: BatchLine
    rows: Sequence[SampleRow]
    result: GroupResult


_LINE = TypeAdapter(BatchLine)
_LEDGER_LINE = TypeAdapter(LedgerLine)
_ROW = TypeAdapter(SampleRow)
_FIELDS = tuple(known.name for known in fields(SampleRow))


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
    lines = "".join(json.dumps(_values(row), ensure_ascii=False) + "\n" for row in rows)
    # Replies may have lone surrogates, which become escapes in JSON.
    return lines.encode("utf-8", "backslashreplace")


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
            rows = [_row(sample) for sample in samples[start : start + line.rows]]
            ledger = _LEDGER_LINE.validate_json(ledgers[number])
        except (ValueError, IndexError):
            break
        if len(rows) < line.rows:
            break
        start += line.rows
        found.append(StoredBatch(line, rows, _result_of(line, ledger)))
    return found


def committed_rows(folder: Path) -> int | None:
    """How many rows are of committed batches; None where batches are not logged."""
    if not (folder / BATCHES).exists():
        return None
    return sum(_LINE.validate_json(text).rows for text in _whole_lines(folder / BATCHES))


def cut(folder: Path, batches: Sequence[StoredBatch]) -> None:
    """Remove what follows these batches in the files."""
    rows = sum(batch.line.rows for batch in batches)
    for name, lines in ((SAMPLES, rows), (LEDGER, len(batches)), (BATCHES, len(batches))):
        path = folder / name
        if path.exists():
            kept = sum(map(len, _whole_lines(path)[:lines]))
            os.truncate(path, kept)


def _append(path: Path, lines: bytes, *, flush: bool) -> None:
    with naming(path), path.open("ab") as file:
        file.write(lines)
        if flush:
            file.flush()
            os.fsync(file.fileno())


def _whole_lines(path: Path) -> list[bytes]:
    """The lines of a file but for a torn last one; none where there is no file."""
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    return [line for line in lines if line.endswith(b"\n")]


def _row(text: bytes) -> SampleRow:
    return _ROW.validate_python(parse_line(text))


def _line_of(batch: ArmBatch) -> BatchLine:
    result = batch.result
    return BatchLine(
        round=batch.round,
        arm=batch.arm,
        rows=len(batch.samples),
        busy_s=result.busy,
        clean=result.clean,
        lost=batch.lost,
        moved=result.moved,
        step_times=result.step_times,
        compiled=result.compiled,
        evicted=result.evicted,
        counted=result.counted,
    )


def _ledger_of(batch: ArmBatch) -> LedgerLine:
    snapshots = batch.result.snapshots
    return LedgerLine(
        round=batch.round,
        arm=batch.arm,
        pool=snapshots[0].pool if snapshots else 0,
        time=[snapshot.time for snapshot in snapshots],
        blocks={kind: [snapshot.blocks[kind] for snapshot in snapshots] for kind in KINDS},
    )


def _result_of(line: BatchLine, ledger: LedgerLine) -> GroupResult:
    return GroupResult(
        outcomes=(),
        busy=line.busy_s,
        snapshots=ledger.snapshots(),
        clean=line.clean,
        moved=line.moved,
        step_times=line.step_times,
        compiled=tuple(line.compiled),
        evicted=line.evicted,
        counted=line.counted,
    )
