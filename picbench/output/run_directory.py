"""The run directory.

    manifest.json   what was asked for and on what; `status` is "running" until the run ends
    samples.jsonl   a row for each request of each arm, appended as results come
    memory.parquet  the block ledger: a row for each scheduler step of each arm
    summary.json    aggregates by arm
    logs/           the output of each arm's engine

Readers must tolerate a torn last line of samples.jsonl, which a killed run can leave.
"""

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from picbench.engines.ledger import KINDS, Snapshot
from picbench.errors import ConfigError
from picbench.output.json_file import write_json
from picbench.output.sample_row import SampleRow

MANIFEST = "manifest.json"
SAMPLES = "samples.jsonl"
MEMORY = "memory.parquet"
SUMMARY = "summary.json"


class RunDirectory:
    """A directory that one run writes; `discard` removes all that `create` made."""

    def __init__(self, path: Path, made: tuple[Path, ...] = ()) -> None:
        self.path = path
        self._made = made

    @classmethod
    def create(cls, path: Path) -> "RunDirectory":
        """Make the directory, or take an empty one; ConfigError where that cannot be."""
        check_free(path)
        missing = tuple(p for p in (path, *path.parents) if not p.exists())
        try:
            (path / "logs").mkdir(parents=True)
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
        write_json(self.path / MANIFEST, manifest)

    def append(self, rows: Iterable[SampleRow]) -> None:
        """Append rows and sync them to disk."""
        lines = "".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows)
        with (self.path / SAMPLES).open("ab") as file:
            file.write(lines.encode("utf-8", "backslashreplace"))
            file.flush()
            os.fsync(file.fileno())

    def write_memory(self, ledgers: Mapping[str, Iterable[Snapshot]]) -> None:
        """Write the ledgers of all arms."""
        rows = [
            {"arm": arm, "step": s.step, "time": s.time, "pool": s.pool, **s.blocks}
            for arm, snapshots in ledgers.items()
            for s in snapshots
        ]
        pq.write_table(pa.Table.from_pylist(rows, schema=_memory_schema()), self.path / MEMORY)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write or replace the summary."""
        write_json(self.path / SUMMARY, summary)

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
    """ConfigError unless a run may be written to `path`: absent, or an empty directory."""
    try:
        taken = path.exists() and (not path.is_dir() or any(path.iterdir()))
    except OSError as error:
        raise _unwritable(path, error) from error
    if taken:
        raise ConfigError(f"`output` {path}: exists and is not empty", hint="name a new folder")


def _memory_schema() -> pa.Schema:
    head = [
        ("arm", pa.string()),
        ("step", pa.int64()),
        ("time", pa.float64()),
        ("pool", pa.int64()),
    ]
    return pa.schema([*head, *((kind, pa.float64()) for kind in KINDS)])


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"`output` {path}: cannot be written: {error.strerror}", hint="name another folder"
    )
