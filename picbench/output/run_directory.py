"""The run directory.

    manifest.json   what was asked for and on what; `status` is "running" until the run ends
    workload.jsonl  what was sent: prompts, right answers, which samples share chunks
    samples.jsonl   a row for each request of each arm, appended as results come
    batches.jsonl   a row for each batch of each arm: what was measured of it as a whole
    ledger.jsonl    the block ledger so far, until the run has ended
    memory.parquet  the block ledger: a row for each scheduler step of each arm
    summary.json    aggregates by arm
    logs/           the output of each arm's engine

Readers must tolerate what a killed run leaves: a torn last line of samples.jsonl, and rows of a
batch that batches.jsonl does not have (see `store/batch_log.py`).
"""

import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from picbench.engines.ledger import KINDS, Snapshot
from picbench.errors import ConfigError
from picbench.output.json_file import write_json
from picbench.output.sample_row import SampleRow
from picbench.output.store.batch_log import LEDGER, SAMPLES, BatchLog, append_rows
from picbench.output.store.documents import SCHEMA
from picbench.output.store.workload_file import write_workload
from picbench.run.protocol import ArmBatch
from picbench.whole_files import check_place, whole_file
from picbench.workloads.facts import ChunkSet
from picbench.workloads.sample import Sample

MANIFEST = "manifest.json"
WORKLOAD = "workload.jsonl"
MEMORY = "memory.parquet"
SUMMARY = "summary.json"

#: What a run writes before its manifest.
_EARLY = ("logs", WORKLOAD)
_EARLY_DRAFTS = re.compile(rf"\.({re.escape(WORKLOAD)}|{re.escape(MANIFEST)})\.(\d+\.)?tmp")


class RunDirectory:
    """A directory that one run writes; `discard` removes all that `create` made."""

    def __init__(self, path: Path, made: tuple[Path, ...] = ()) -> None:
        self.path = path
        self._made = made
        self._log = BatchLog(path)

    @classmethod
    def create(cls, path: Path) -> "RunDirectory":
        """Make the directory, or take a free one; ConfigError where that cannot be."""
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
        """Write what is sent; see `store/workload_file.py`."""
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
        """Remove what only a run that goes on needs."""
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
    """ConfigError unless a run may be written to `path`: absent below a directory, or an empty one.

    One that was killed before its manifest was written counts as empty.
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
    head = [
        ("arm", pa.string()),
        ("step", pa.int64()),
        ("time", pa.float64()),
        ("pool", pa.int64()),
    ]
    return pa.schema([*head, *((kind, pa.float64()) for kind in KINDS)])


def _memory_table(arm: str, snapshots: Sequence[Snapshot]) -> pa.Table:
    columns = {
        "arm": [arm] * len(snapshots),
        "step": [s.step for s in snapshots],
        "time": [s.time for s in snapshots],
        "pool": [s.pool for s in snapshots],
        **{kind: [s.blocks[kind] for s in snapshots] for kind in KINDS},
    }
    return pa.Table.from_pydict(columns, schema=_memory_schema())


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"`output` {path}: cannot be written: {error.strerror}", hint="name another folder"
    )
