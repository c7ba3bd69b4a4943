"""A folder of files: survives restarts and is shared by the processes of one machine."""

import errno
import fcntl
import os
import shutil
import sqlite3
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import ClassVar, Self

from picbench.engines.chunk_cache.tiers.tier import Allocate, Buffer, Key, Tier, TierSpec

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
        self._files.remove_abandoned()
        self._index.adopt(self._files.scan(self._index.keys()))

    @classmethod
    def check(cls, spec: TierSpec) -> Path:
        """The folder; refuse what has none, or no capacity."""
        spec.check_options()
        spec.require_capacity()
        try:
            return Path(spec.require_location("a folder", cls.notation)).expanduser()
        except RuntimeError as error:  # No user has the name after the tilde.
            spec.reject(f"cannot use the folder: {error}", "write out the path")

    @classmethod
    def probe(cls, spec: TierSpec) -> None:
        """Refuse a folder that cannot be written to or made, and a capacity beyond the disk's."""
        root = cls.check(spec)
        nearest = next(path for path in (root, *root.absolute().parents) if path.exists())
        # /proc takes no files, and its permissions do not say so.
        size = shutil.disk_usage(nearest).total
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK) or not size:
            spec.reject("cannot use the folder", "name a folder that can be written to")
        if spec.require_capacity() > size:
            spec.reject(f"the disk has {size >> 20:,} MiB in all", "lower the capacity")

    @classmethod
    def open(cls, spec: TierSpec, allocate: Allocate) -> Self:
        """``disk:/path:20GiB``; a missing folder is created."""
        root = cls.check(spec)
        try:
            root.mkdir(parents=True, exist_ok=True)
            return cls(root, spec.require_capacity())
        except (OSError, sqlite3.Error) as error:
            spec.reject(f"cannot use the folder: {error}", "name a folder that can be written to")

    def exists(self, keys: Sequence[Key]) -> list[bool]:
        """Whether the index lists a value, per key; its file may have been removed by hand."""
        return self._index.contains(keys)

    def put(self, items: Sequence[tuple[Key, Buffer]]) -> list[bool]:
        """Write and flush values; False without room. Raises the disk's error if all are False."""
        kept, full = list[bool](), None
        for key, value in items:
            try:
                kept.append(self._put(key, memoryview(value)))
            except (OSError, sqlite3.OperationalError) as error:
                if not _is_full(error):
                    raise
                kept.append(False)
                full = error
        if full is not None and not any(kept):
            raise full
        return kept

    def get(self, keys: Sequence[Key]) -> list[Buffer | None]:
        """Read values into fresh memory."""
        listed = self._index.use(keys)
        return [self._read(key) if there else None for key, there in zip(keys, listed, strict=True)]

    def delete(self, keys: Sequence[Key]) -> None:
        """Remove values and their files."""
        self._index.remove(keys)
        for key in keys:
            self._files.remove(key)

    def close(self) -> None:
        """Close the index; values stay."""
        self._index.close()

    def _put(self, key: Key, value: memoryview) -> bool:
        """Whether the value is in place; it is not if another process evicted it meanwhile."""
        if value.nbytes > self._capacity:
            return False
        self._index.reserve(key, value.nbytes, self._capacity, self._files.remove)
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
            with suppress(sqlite3.OperationalError):  # it can be read, but not written to
                self._index.remove([key])
        return value


class ValueFiles:
    """``values/<two digits>/<key in hexadecimal>``; ``partial/`` holds what is being written."""

    def __init__(self, root: Path) -> None:
        self._values = root / "values"
        self._partial = root / "partial"
        self._values.mkdir(exist_ok=True)
        self._partial.mkdir(exist_ok=True)

    def write(self, key: Key, value: memoryview) -> None:
        """Write a value; raises OSError, and leaves no file, if that fails.

        The file is flushed, its folder is not: a crash may lose a renamed value, which is a miss.
        """
        path = self._path(key)
        path.parent.mkdir(exist_ok=True)
        handle, partial = self._begin()
        try:
            with os.fdopen(handle, "wb", buffering=0) as file:
                left = value.cast("B") if value.nbytes else value
                while left.nbytes:
                    left = left[os.write(file.fileno(), left) :]
                os.fsync(file.fileno())
                Path(partial).replace(path)
        except BaseException:
            Path(partial).unlink(missing_ok=True)
            raise

    def _begin(self) -> tuple[int, str]:
        """A new file and its descriptor, locked so that `remove_abandoned` leaves it alone."""
        while True:
            handle, partial = tempfile.mkstemp(dir=self._partial)
            fcntl.flock(handle, fcntl.LOCK_EX)
            if os.fstat(handle).st_nlink:
                return handle, partial
            # Another process opened the folder and removed the file before it was locked.
            os.close(handle)

    def read(self, key: Key) -> bytes | None:
        """A value, None if it has no file."""
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            return None

    def remove(self, key: Key) -> None:
        """Remove a value's file, if there is one; current readers can finish."""
        self._path(key).unlink(missing_ok=True)

    def remove_abandoned(self) -> None:
        """Remove files that processes were writing when they died."""
        for partial in self._partial.iterdir():
            with suppress(FileNotFoundError, BlockingIOError), partial.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                partial.unlink()

    def scan(self, known: Collection[Key]) -> Iterator[tuple[Key, int]]:
        """(key, bytes) of the files of values that are not `known`, oldest first."""
        found: list[tuple[int, Key, int]] = []
        for path in self._values.glob("*/*"):
            key = _key(path)
            # Another process may remove the value meanwhile.
            with suppress(FileNotFoundError):
                if key is not None and key not in known:
                    status = path.stat()
                    if stat.S_ISREG(status.st_mode):
                        found.append((status.st_mtime_ns, key, status.st_size))
        yield from ((key, size) for _, key, size in sorted(found))

    def _path(self, key: Key) -> Path:
        name = key.hex()
        return self._values / name[-2:] / name


def _is_full(error: OSError | sqlite3.OperationalError) -> bool:
    if isinstance(error, OSError):
        return error.errno in _FULL
    return error.sqlite_errorcode == sqlite3.SQLITE_FULL


def _key(path: Path) -> Key | None:
    """The key that a file is named after, None for foreign files."""
    try:
        return bytes.fromhex(path.name)
    except ValueError:
        return None


# `used` is a logical clock: wall clocks jump. Totals are kept by triggers, since summing all rows
# on every put would make puts slower the more is kept.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS value (
    key BLOB PRIMARY KEY, bytes INTEGER NOT NULL, used INTEGER NOT NULL, ready INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS value_used ON value (used);
CREATE TABLE IF NOT EXISTS total (objects INTEGER NOT NULL, bytes INTEGER NOT NULL, clock INTEGER);
INSERT INTO total SELECT 0, 0, 0 WHERE NOT EXISTS (SELECT * FROM total);
CREATE TRIGGER IF NOT EXISTS value_added AFTER INSERT ON value BEGIN
    UPDATE total SET objects = objects + 1, bytes = bytes + NEW.bytes;
END;
CREATE TRIGGER IF NOT EXISTS value_removed AFTER DELETE ON value BEGIN
    UPDATE total SET objects = objects - 1, bytes = bytes - OLD.bytes;
END;
"""
_BUSY_SECONDS = 5.0
_BUSY_PAUSE = 0.01


class DiskIndex:
    """A SQLite file that all processes with the same folder share.

    A damaged file is replaced by an empty one; `adopt` then lists the values again.
    """

    def __init__(self, path: Path) -> None:
        self._lock = Lock()
        try:
            self._connection = _connect(path)
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError:
            for suffix in ("", "-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            self._connection = _connect(path)

    def keys(self) -> set[Key]:
        """All keys, including those of values that are being written."""
        with self._transaction("BEGIN") as run:
            return {key for (key,) in run.execute("SELECT key FROM value")}

    def adopt(self, found: Iterable[tuple[Key, int]]) -> None:
        """List values whose files were found but not listed, oldest first."""
        with self._transaction() as run:
            for key, nbytes in found:
                run.execute(
                    "INSERT OR IGNORE INTO value VALUES (?, ?, ?, 1)", (key, nbytes, _tick(run))
                )

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """Whether values are there, per key."""
        sql = "SELECT 1 FROM value WHERE key = ? AND ready"
        with self._transaction("BEGIN") as run:
            return [run.execute(sql, (key,)).fetchone() is not None for key in keys]

    def use(self, keys: Sequence[Key]) -> list[bool]:
        """Mark values as used, if anything can be written; returns whether they are there."""
        sql = "UPDATE value SET used = ? WHERE key = ? AND ready"
        try:
            with self._transaction() as run:
                return [run.execute(sql, (_tick(run), key)).rowcount > 0 for key in keys]
        except sqlite3.OperationalError:
            return self.contains(keys)

    def reserve(self, key: Key, nbytes: int, capacity: int, remove: Callable[[Key], None]) -> None:
        """Make room for a value, listed once `publish` is called.

        `remove` removes a file, before its room counts. `nbytes` must not exceed `capacity`.
        """
        with self._transaction() as run:
            run.execute("DELETE FROM value WHERE key = ?", (key,))
            total = "SELECT bytes FROM total"
            while run.execute(total).fetchone()[0] + nbytes > capacity:
                sql = "SELECT key FROM value ORDER BY used LIMIT 1"
                (victim,) = run.execute(sql).fetchone()
                run.execute("DELETE FROM value WHERE key = ?", (victim,))
                remove(victim)
            run.execute("INSERT INTO value VALUES (?, ?, ?, 0)", (key, nbytes, _tick(run)))

    def publish(self, key: Key) -> bool:
        """List a value whose file is in place; False if its reservation is gone."""
        with self._transaction() as run:
            sql = "UPDATE value SET ready = 1 WHERE key = ?"
            return run.execute(sql, (key,)).rowcount > 0

    def remove(self, keys: Sequence[Key]) -> None:
        """Remove values from the index."""
        with self._transaction() as run:
            run.executemany("DELETE FROM value WHERE key = ?", [(key,) for key in keys])

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    @contextmanager
    def _transaction(self, begin: str = "BEGIN IMMEDIATE") -> Iterator[sqlite3.Connection]:
        """A transaction that writes, at once, so that it cannot fail halfway because others write.

        A plain `begin` is enough to read, also from what cannot be written to.
        """
        with self._lock:
            self._connection.execute(begin)
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # SQLite itself rolls back after some errors
                    self._connection.execute("ROLLBACK")
                raise


def _connect(path: Path) -> sqlite3.Connection:
    """A connection; SQLite does not wait for others that create the same file at the same time."""
    end = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            return _open(path)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                raise
        time.sleep(_BUSY_PAUSE)


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
    )
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        # The last entries may be lost with the power, not the file's integrity.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.executescript(_SCHEMA)
        (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(found)
    except BaseException:
        connection.close()
        raise
    return connection


def _tick(run: sqlite3.Connection) -> int:
    (clock,) = run.execute("UPDATE total SET clock = clock + 1 RETURNING clock").fetchone()
    return int(clock)
