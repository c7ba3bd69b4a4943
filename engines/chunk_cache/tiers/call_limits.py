"""Limits on calls to one tier: a deadline for each, and pauses while the tier fails."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from threading import BoundedSemaphore, Lock, Thread
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses during an outage in seconds: `first`, doubled after each failed probe to `longest`."""

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

    @property
    def failing(self) -> bool:
        """Whether there is an outage."""
        with self._lock:
            return self._failures > 0

    def admit(self) -> bool:
        """Whether a call may be made now; its outcome must be reported: `succeed` or `fail`."""
        with self._lock:
            if not self._failures:
                return True
            if self._probing or self._clock() < self._open_until:
                return False
            self._probing = True
            return True

    def succeed(self) -> bool:
        """Report an answer; returns whether it ends an outage."""
        with self._lock:
            recovered = self._failures > 0
            self._failures = 0
            self._probing = False
            return recovered

    def fail(self) -> bool:
        """Report a failure; returns whether it begins an outage."""
        with self._lock:
            if self._failures and not self._probing:
                return False  # the call began before the outage did and is not a probe
            self._failures += 1
            self._probing = False
            self._open_until = self._clock() + self._backoff.pause(self._failures)
            return self._failures == 1


class Timebox:
    """Runs calls with deadlines on daemon threads, one a call, at most `limit` at a time.

    A call that outlives its deadline keeps its thread until it returns, and its result is dropped.
    With `limit` such calls, further ones wait for a thread until their own deadline. Unlike an
    executor's threads, daemon threads do not keep the process from exiting. Starting one takes tens
    of microseconds, little compared with a transfer.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._free = BoundedSemaphore(limit)

    def run(self, call: Callable[[], T], deadline: float) -> T:
        """What `call` returns or raises; TimeoutError after `deadline` seconds."""
        end = time.monotonic() + deadline
        if not self._free.acquire(timeout=deadline):
            raise TimeoutError(f"all threads of {self._name} are stuck")
        future: Future[T] = Future()
        thread = Thread(target=self._call, args=(call, future), name=self._name, daemon=True)
        try:
            thread.start()
        except BaseException:
            self._free.release()
            raise
        return future.result(max(0.0, end - time.monotonic()))

    def _call(self, call: Callable[[], T], future: Future[T]) -> None:
        try:
            result = call()
        except BaseException as error:
            self._free.release()
            future.set_exception(error)
        else:
            self._free.release()
            future.set_result(result)
