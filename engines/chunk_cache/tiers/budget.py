"""Bytes that may be in flight."""

from threading import Lock


class Budget:
    """A number of bytes that is taken and given back, never waited for."""

    def __init__(self, limit: int) -> None:
        self._lock = Lock()
        self._left = limit
        self.refusals = 0

    def take(self, nbytes: int) -> bool:
        """Take bytes if so many are left."""
        with self._lock:
            enough = nbytes <= self._left
            self._left -= nbytes if enough else 0
            self.refusals += not enough
            return enough

    def give(self, nbytes: int) -> None:
        """Give back what was taken."""
        with self._lock:
            self._left += nbytes
