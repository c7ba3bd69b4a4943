"""Streams of a device that does what is queued when a test lets it, in any order that is legal."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from picbench.engines.vllm.transfer.pool_rows import PoolRows
from picbench.engines.vllm.transfer.stream_copies import Streams


@dataclass(eq=False)
class Event:
    """How often it was recorded, and how many of these records were reached."""

    recorded: int = 0
    reached: int = 0


@dataclass(eq=False)
class Queue:
    """What a stream has to do; an entry that returns False waits."""

    entries: deque[Callable[[], bool]] = field(default_factory=deque)

    def go_on(self) -> bool:
        """Do the next entry; False if there is none or it waits."""
        if not self.entries or not self.entries[0]():
            return False
        self.entries.popleft()
        return True


class QueuedStreams(Streams):
    """The first queue is that of the steps; `broken` runs raise."""

    def __init__(self) -> None:
        self.queues = [Queue()]
        self.broken = 0

    def steps(self) -> Queue:
        return self.queues[0]

    def open(self) -> Queue:
        self.queues.append(Queue())
        return self.queues[-1]

    def run(self, stream: Queue, work: Callable[[], object]) -> None:
        if self.broken:
            self.broken -= 1
            if not self.broken:
                raise RuntimeError("injected")

        def do() -> bool:
            work()
            return True

        stream.entries.append(do)

    def event(self) -> Event:
        return Event()

    def record(self, event: Event, stream: Queue) -> None:
        event.recorded += 1
        number = event.recorded

        def reach() -> bool:
            event.reached = number
            return True

        stream.entries.append(reach)

    def wait(self, stream: Queue, event: Event) -> None:
        number = event.recorded
        stream.entries.append(lambda: event.reached >= number)

    def reached(self, event: Event) -> bool:
        return event.reached >= event.recorded

    def finish(self, stream: Queue) -> None:
        while stream.entries:
            self.go_on(self.queues)

    def go_on(self, queues: Sequence[Queue]) -> None:
        """Do what the first queue that can go on has to do next."""
        if not any(queue.go_on() for queue in queues):
            assert not any(queue.entries for queue in queues), "all queues wait for each other"

    def drain(self) -> None:
        """Do everything."""
        while any(queue.entries for queue in self.queues):
            self.go_on(self.queues)

    def pin(self, memory: Tensor) -> None:
        pass

    def unpin(self, memory: Tensor) -> None:
        pass

    def pinned(self, pool: PoolRows, rows: int) -> Tensor:
        return pool.empty(rows)
