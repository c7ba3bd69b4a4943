"""When requests are submitted: in a closed loop, or each at its arrival time (an open loop)."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from picbench.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Submission(Generic[T]):
    """An item that is submitted now.

    `arrived` is the time (Unix seconds) from which its latency counts: when there was room for it
    in a closed loop, when it was due in an open one. `late` is how many seconds later than its due
    time it is submitted (0 in a closed loop).
    """

    item: T
    arrived: float
    late: float


class Pace(Generic[T]):
    """Yields items to submit, at most `limit` in flight.

    Without `arrivals` an item is due as soon as there is room for it (a closed loop), and arrives
    then, though whoever submits it may be busy. With them, in seconds from now for each item, no
    item is submitted before its time; without room, or while the engine is busy, it is submitted as
    soon as possible, and is late. `clock` is monotonic, `wall` gives Unix seconds: it is read for
    each submission, because a wall clock that is set would shift all that is counted from before.
    """

    def __init__(
        self,
        items: Sequence[T],
        limit: int,
        arrivals: Sequence[float] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._clock, self._wall = clock, wall
        self._limit = limit
        self._in_flight = 0
        self._queue = deque(_in_order(items, arrivals))
        # When there was room for each of the next items, in seconds from the beginning.
        self._room = deque([0.0] * min(limit, len(self._queue)))
        self._began = clock()

    def __bool__(self) -> bool:
        """Whether any item is waiting or in flight."""
        return bool(self._queue) or self._in_flight > 0

    @property
    def idle(self) -> bool:
        """Whether no item is in flight."""
        return self._in_flight == 0

    def due(self) -> Iterator[Submission[T]]:
        """The items that may be submitted now."""
        while self._queue and self._in_flight < self._limit:
            item, due = self._queue[0]
            now = self._clock() - self._began
            if due is not None and now < due:
                return
            self._queue.popleft()
            self._in_flight += 1
            room = self._room.popleft()
            arrived = self._wall() - (now - (room if due is None else due))
            yield Submission(item, arrived, 0.0 if due is None else now - due)

    def finished(self) -> None:
        """One of the items in flight is finished."""
        self._in_flight -= 1
        self._room.append(self._clock() - self._began)

    def wait(self) -> None:
        """Sleep until the next item is due."""
        due = self._queue[0][1] if self._queue else None
        if due is not None:
            time.sleep(max(0.0, self._began + due - self._clock()))


def _in_order(items: Sequence[T], arrivals: Sequence[float] | None) -> list[tuple[T, float | None]]:
    if arrivals is None:
        return [(item, None) for item in items]
    if len(arrivals) != len(items) or not all(0 <= due < float("inf") for due in arrivals):
        raise ConfigError(
            f"{len(arrivals)} arrival times for {len(items)} requests, or one that cannot be",
            hint="give one time in seconds, from 0 on, for each request",
        )
    order = sorted(range(len(items)), key=arrivals.__getitem__)
    return [(items[index], arrivals[index]) for index in order]
