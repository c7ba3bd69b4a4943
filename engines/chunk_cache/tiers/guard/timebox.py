"""Calls that may hang, kept from hanging whoever makes them."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from threading import BoundedSemaphore, Thread
from typing import TypeVar

T = TypeVar("T")


class Timebox:
    """Runs calls on daemon threads, one a call, at most `limit` at a time.

    A call that outlives its deadline keeps its thread until it returns, and what it returns is
    dropped; with `limit` such calls, further ones wait for a thread until their own deadline.
    Daemon threads, unlike an executor's, do not keep the process from ending. Starting one takes
    tens of microseconds, little beside what a tier moves.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._free = BoundedSemaphore(limit)

    def run(self, call: Callable[[], T], deadline: float) -> T:
        """What `call` returns or raises; TimeoutError when `deadline` seconds pass first."""
        end = time.monotonic() + deadline
        if not self._free.acquire(timeout=deadline):
            raise TimeoutError(f"all threads of {self._name} are stuck")
        future: Future[T] = Future()
        Thread(target=self._carry_out, args=(call, future), name=self._name, daemon=True).start()
        return future.result(max(0.0, end - time.monotonic()))

    def _carry_out(self, call: Callable[[], T], future: Future[T]) -> None:
        try:
            result = call()
        except BaseException as error:
            self._free.release()
            future.set_exception(error)
        else:
            self._free.release()
            future.set_result(result)
