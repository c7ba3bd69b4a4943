"""The index of a disk tier: which values there are, their sizes and their last use."""

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from picbench.engines.chunk_cache.tiers.tier import Key

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
        with self._transaction("BEGIN") as run:
            return [_is_ready(run, key) for key in keys]

    def use(self, keys: Sequence[Key]) -> list[bool]:
        """Mark values as used now; returns whether they are there, per key.

        Where nothing can be written, on a full disk or a read-only one, nothing is marked.
        """
        sql = "UPDATE value SET used = ? WHERE key = ? AND ready"
        try:
            with self._transaction() as run:
                return [run.execute(sql, (_tick(run), key)).rowcount > 0 for key in keys]
        except sqlite3.OperationalError:
            return self.contains(keys)

    def reserve(self, key: Key, nbytes: int, capacity: int, remove: Callable[[Key], None]) -> int:
        """Make room for a value, listed once `publish` is called; returns how many were evicted.

        `remove` removes an evicted value's file, before its room counts as free. `nbytes` must not
        exceed `capacity`.
        """
        evicted = 0
        with self._transaction() as run:
            run.execute("DELETE FROM value WHERE key = ?", (key,))
            while _total_bytes(run) + nbytes > capacity:
                sql = "SELECT key FROM value ORDER BY used LIMIT 1"
                (victim,) = run.execute(sql).fetchone()
                run.execute("DELETE FROM value WHERE key = ?", (victim,))
                remove(victim)
                evicted += 1
            run.execute("INSERT INTO value VALUES (?, ?, ?, 0)", (key, nbytes, _tick(run)))
        return evicted

    def publish(self, key: Key) -> bool:
        """List a value whose file is in place; False if its reservation is gone."""
        with self._transaction() as run:
            sql = "UPDATE value SET ready = 1 WHERE key = ?"
            return run.execute(sql, (key,)).rowcount > 0

    def remove(self, keys: Sequence[Key]) -> None:
        """Remove values from the index."""
        with self._transaction() as run:
            run.executemany("DELETE FROM value WHERE key = ?", [(key,) for key in keys])

    def totals(self) -> tuple[int, int]:
        """(objects, bytes), reservations included."""
        with self._transaction("BEGIN") as run:
            objects, nbytes = run.execute("SELECT objects, bytes FROM total").fetchone()
            return objects, nbytes

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


def _is_ready(run: sqlite3.Connection, key: Key) -> bool:
    sql = "SELECT 1 FROM value WHERE key = ? AND ready"
    return run.execute(sql, (key,)).fetchone() is not None


def _total_bytes(run: sqlite3.Connection) -> int:
    (nbytes,) = run.execute("SELECT bytes FROM total").fetchone()
    return int(nbytes)
