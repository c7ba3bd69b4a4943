"""The files of a disk tier: whole values or none."""

import fcntl
import os
import tempfile
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from picbench.engines.chunk_cache.tiers.tier import Key


class ValueFiles:
    """``values/<two digits>/<key in hexadecimal>``; ``partial/`` holds what is being written."""

    def __init__(self, root: Path) -> None:
        self._values = root / "values"
        self._partial = root / "partial"
        self._values.mkdir(exist_ok=True)
        self._partial.mkdir(exist_ok=True)

    def write(self, key: Key, value: memoryview) -> None:
        """Write a value; raises OSError, and leaves no file, if that fails.

        The file is flushed before it gets its name. The folder is not: a crash may lose a value
        that was just renamed, which is a miss.
        """
        path = self._path(key)
        path.parent.mkdir(exist_ok=True)
        handle, partial = self._begin()
        try:
            with os.fdopen(handle, "wb", buffering=0) as file:
                _write_all(file.fileno(), value)
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
        paths = [path for path in self._values.glob("*/*") if _key(path) not in known]
        stats = [(path, path.stat()) for path in paths]
        for path, stat in sorted(stats, key=lambda entry: entry[1].st_mtime_ns):
            key = _key(path)
            if key is not None:
                yield key, stat.st_size

    def _path(self, key: Key) -> Path:
        name = key.hex()
        return self._values / name[-2:] / name


def _write_all(descriptor: int, value: memoryview) -> None:
    left = value.cast("B") if value.nbytes else value
    while left.nbytes:
        left = left[os.write(descriptor, left) :]


def _key(path: Path) -> Key | None:
    """The key that a file is named after, None for foreign files."""
    try:
        return bytes.fromhex(path.name)
    except ValueError:
        return None
