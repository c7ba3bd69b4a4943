"""Background threads for one kind of work, in groups that answer one ticket."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Lock
from typing import Any, TypeVar

from picbench.engines.chunk_cache.tiers.guard.ticket import Ticket, TicketPart

T = TypeVar("T")

Group = Sequence[int]


class Lane:
    """A thread pool that remembers what is pending, so that it can be drained.

    Work must end by itself; the process waits for what has begun when it ends.
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
        """A ticket of `size` answers; `work` gives those of a group, in the group's order.

        `after` is called once for each group, when its work has ended or was dropped.
        """
        parts = [self._submit(group, work, after) for group in groups]
        return Ticket(size, nothing, parts)

    def drain(self, timeout: float) -> bool:
        """Take no more work, wait for what is pending, then drop what has not begun.

        Returns whether everything ended in time. Later work is answered `nothing`.
        """
        with self._lock:
            self._closed = True
            pending = set(self._pending)
        late = wait(pending, timeout).not_done
        self._pool.shutdown(wait=False, cancel_futures=True)
        return not late

    def _submit(
        self, group: Group, work: Callable[[Group], list[T]], after: Callable[[Group], None]
    ) -> TicketPart[T]:
        with self._lock:
            future = _dropped() if self._closed else self._pool.submit(work, group)
            self._pending.add(future)
        future.add_done_callback(lambda _: after(group))
        future.add_done_callback(self._forget)
        return TicketPart(group, future)

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._pending.discard(future)


def _dropped() -> Future[Any]:
    future: Future[Any] = Future()
    future.cancel()
    return future


def group_by_size(sizes: Sequence[int], limit: int, entries: Sequence[int]) -> Sequence[Group]:
    """`entries` in order, cut so that each group's sizes sum to `limit` at most, or it is alone."""
    groups: list[list[int]] = []
    filled = 0
    for entry in entries:
        if not groups or filled + sizes[entry] > limit:
            groups.append([])
            filled = 0
        groups[-1].append(entry)
        filled += sizes[entry]
    return groups
