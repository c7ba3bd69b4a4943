"""Background work on tiers: threads, tickets for answers that come later, bytes in flight."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any, Generic, TypeVar

T = TypeVar("T")

Group = Sequence[int]


@dataclass(frozen=True, slots=True)
class TicketGroup(Generic[T]):
    """The answers of a ticket at the indices of `group`, in that order."""

    group: Group
    future: Future[list[T]]


class Ticket(Generic[T]):
    """The answers to a batch, later; what is in no group or was dropped is answered `nothing`."""

    def __init__(self, size: int, nothing: T, groups: Sequence[TicketGroup[T]]) -> None:
        self._size = size
        self._nothing = nothing
        self._groups = groups

    def done(self) -> bool:
        """Whether `result` would return at once; never blocks."""
        return all(group.future.done() for group in self._groups)

    def result(self, timeout: float | None = None) -> list[T]:
        """The answers, in order; TimeoutError if they take longer than `timeout` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        answers = [self._nothing] * self._size
        for group in self._groups:
            left = None if end is None else max(0.0, end - time.monotonic())
            with suppress(CancelledError):
                for index, answer in zip(group.group, group.future.result(left), strict=False):
                    answers[index] = answer
        return answers

    def cancel(self) -> None:
        """Drop what has not begun; what has begun goes on."""
        for group in self._groups:
            group.future.cancel()


class BackgroundPool:
    """A thread pool for one kind of work, which can be drained.

    Work must end by itself: a process that exits waits for what has begun.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, name)
        self._lock = Lock()
        self._pending: set[Future[Any]] = set()
        self._closed = False

    def run(
        self,
        size: int,
        nothing: T,
        groups: Sequence[Group],
        work: Callable[[Group], list[T]],
        after: Callable[[Group], None] = lambda group: None,
    ) -> Ticket[T]:
        """A ticket of `size` answers; `work` returns those of a group of indices, in its order.

        `after` is called once for each group, when its work has ended or was dropped.
        """
        return Ticket(size, nothing, [self._submit(group, work, after) for group in groups])

    def drain(self, timeout: float) -> bool:
        """Take no more work, wait for what is pending, then drop what has not begun.

        Returns whether everything ended in time.
        """
        with self._lock:
            self._closed = True
            pending = set(self._pending)
        late = wait(pending, timeout).not_done
        self._pool.shutdown(wait=False, cancel_futures=True)
        return not late

    def _submit(
        self, group: Group, work: Callable[[Group], list[T]], after: Callable[[Group], None]
    ) -> TicketGroup[T]:
        with self._lock:
            future = _dropped() if self._closed else self._pool.submit(work, group)
            self._pending.add(future)
        future.add_done_callback(lambda _: after(group))
        future.add_done_callback(self._forget)
        return TicketGroup(group, future)

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._pending.discard(future)


class Budget:
    """A number of bytes that may be in flight; `take` never waits.

    What is larger than all of it is in flight alone.
    """

    def __init__(self, limit: int) -> None:
        self._lock = Lock()
        self._limit = self._left = limit
        self.refusals = 0

    def take(self, nbytes: int) -> bool:
        """Take `nbytes` if so many are left; False and one more of `refusals` otherwise."""
        with self._lock:
            enough = nbytes <= self._left or self._left == self._limit
            self._left -= nbytes if enough else 0
            self.refusals += not enough
            return enough

    def give(self, nbytes: int) -> None:
        """Give back what was taken."""
        with self._lock:
            self._left += nbytes


def _dropped() -> Future[Any]:
    future: Future[Any] = Future()
    future.cancel()
    return future


def group_by_size(sizes: Sequence[int], limit: int, indices: Sequence[int]) -> Sequence[Group]:
    """Split indices, in order, into groups of at most `limit` bytes; larger ones are alone."""
    groups: list[list[int]] = []
    filled = 0
    for index in indices:
        if not groups or filled + sizes[index] > limit:
            groups.append([])
            filled = 0
        groups[-1].append(index)
        filled += sizes[index]
    return groups
