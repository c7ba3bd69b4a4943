"""When to leave a failing tier alone, and when to try it again."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses of an outage in seconds: `first`, doubled after each failed probe, up to `longest`."""

    first: float = 0.5
    longest: float = 30.0

    def pause(self, failures: int) -> float:
        """The pause after so many failures in a row, one or more."""
        return min(self.longest, self.first * 2.0 ** min(failures - 1, 32))


class Breaker:
    """A circuit breaker: closed, open after a failure, half-open for one probe after a pause."""

    def __init__(self, backoff: Backoff, clock: Callable[[], float] = time.monotonic) -> None:
        self._backoff = backoff
        self._clock = clock
        self._lock = Lock()
        self._failures = 0
        self._open_until = 0.0
        self._probing = False

    def admit(self) -> bool:
        """Whether a call may be made now; who is admitted reports `succeed` or `fail`."""
        with self._lock:
            if not self._failures:
                return True
            if self._probing or self._clock() < self._open_until:
                return False
            self._probing = True
            return True

    def succeed(self) -> bool:
        """Note an answer; whether it ends an outage."""
        with self._lock:
            recovered = self._failures > 0
            self._failures = 0
            self._probing = False
            return recovered

    def fail(self) -> bool:
        """Note a failure; whether it begins an outage."""
        with self._lock:
            if self._failures and not self._probing:
                return False  # it was under way when the outage began and says nothing new
            self._failures += 1
            self._probing = False
            self._open_until = self._clock() + self._backoff.pause(self._failures)
            return self._failures == 1
