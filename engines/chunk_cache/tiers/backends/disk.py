"""A folder of files: survives restarts and is shared by the processes of one machine."""

import errno
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import ClassVar, Self

from picbench.engines.chunk_cache.tiers.backends.disk_files import ValueFiles
from picbench.engines.chunk_cache.tiers.backends.disk_index import DiskIndex
from picbench.engines.chunk_cache.tiers.options import (
    check_options,
    reject,
    require_capacity,
    require_location,
)
from picbench.engines.chunk_cache.tiers.tier import Allocate, Buffer, Key, Tier, TierSpec, Usage

#: What a full disk, quota or file-size limit says.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Disk(Tier):
    """Values as files, bounded, least recently used out first, across restarts and processes.

    An index (SQLite) in the same folder records which values there are, their sizes and when they
    were last used; all processes that open the folder share one capacity. Space is reserved first;
    then a value is written to a temporary file, flushed and renamed, and only then listed, so that
    a crash leaves the whole value or none. The folder must be on a local file system, because the
    index relies on its locks.
    """

    kind: ClassVar[str] = "disk"
    summary: ClassVar[str] = "files in a local folder; survive restarts, shared by processes"
    notation: ClassVar[str] = "disk:/path:20GiB"

    def __init__(self, root: Path, capacity: int) -> None:
        self.name = f"{self.kind}:{root}"
        self._capacity = capacity
        self._files = ValueFiles(root)
        self._index = DiskIndex(root / "index.sqlite")
        self._lock = Lock()
        self._evictions = 0
        self._refused = 0
        self._files.remove_abandoned()
        self._index.adopt(self._files.scan(self._index.keys()))

    @classmethod
    def open(cls, spec: TierSpec, allocate: Allocate) -> Self:
        """``disk:/path:20GiB``; a missing folder is created."""
        check_options(spec)
        capacity = require_capacity(spec)
        root = Path(require_location(spec, "a folder", cls.notation)).expanduser()
        try:
            root.mkdir(parents=True, exist_ok=True)
            return cls(root, capacity)
        except OSError as error:
            reject(spec, f"cannot use the folder: {error}", "name a folder that can be written to")

    def exists(self, keys: Sequence[Key]) -> list[bool]:
        """Whether the index lists a value, per key; its file may have been removed by hand."""
        return self._index.contains(keys)

    def put(self, items: Sequence[tuple[Key, Buffer]]) -> list[bool]:
        """Write values, each flushed to the disk before it counts; False when there is no room."""
        return [self._put(key, memoryview(value)) for key, value in items]

    def get(self, keys: Sequence[Key]) -> list[Buffer | None]:
        """Read values into fresh memory."""
        listed = self._index.use(keys)
        return [self._read(key) if there else None for key, there in zip(keys, listed, strict=True)]

    def delete(self, keys: Sequence[Key]) -> None:
        """Remove values and their files."""
        self._index.remove(keys)
        for key in keys:
            self._files.remove(key)

    def usage(self) -> Usage:
        """What all processes keep in the folder; `bytes` includes values that are being written."""
        objects, nbytes = self._index.totals()
        return Usage(objects, nbytes, self._capacity, self._evictions, self._refused)

    def close(self) -> None:
        """Close the index; values stay."""
        self._index.close()

    def _put(self, key: Key, value: memoryview) -> bool:
        try:
            kept = self._reserve(key, value.nbytes) and self._write(key, value)
        except (OSError, sqlite3.OperationalError) as error:
            if not _is_full(error):
                raise
            kept = False
        if not kept:
            with self._lock:
                self._refused += 1
        return kept

    def _reserve(self, key: Key, nbytes: int) -> bool:
        if nbytes > self._capacity:
            return False
        evicted = self._index.reserve(key, nbytes, self._capacity, self._files.remove)
        with self._lock:
            self._evictions += evicted
        return True

    def _write(self, key: Key, value: memoryview) -> bool:
        """Whether the value is in place; it is not if another process evicted it meanwhile."""
        written = False
        try:
            self._files.write(key, value)
            written = self._index.publish(key)
        finally:
            if not written:
                with suppress(sqlite3.Error):  # the original error is more useful
                    self._index.remove([key])
                self._files.remove(key)
        return written

    def _read(self, key: Key) -> bytes | None:
        value = self._files.read(key)
        if value is None:
            self._index.remove([key])
        return value


def _is_full(error: OSError | sqlite3.OperationalError) -> bool:
    if isinstance(error, OSError):
        return error.errno in _FULL
    return error.sqlite_errorcode == sqlite3.SQLITE_FULL
