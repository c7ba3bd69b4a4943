"""What a stack hands out at once for an answer that comes later."""

import time
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TicketPart(Generic[T]):
    """Answers for some entries of a ticket, in the order of `entries`."""

    entries: Sequence[int]
    future: Future[list[T]]


class Ticket(Generic[T]):
    """Answers to a batch, one an entry; entries that nobody works on have the answer `nothing`."""

    def __init__(self, size: int, nothing: T, parts: Sequence[TicketPart[T]]) -> None:
        self._size = size
        self._nothing = nothing
        self._parts = parts

    def done(self) -> bool:
        """Whether `result` would return at once; never blocks."""
        return all(part.future.done() for part in self._parts)

    def result(self, timeout: float | None = None) -> list[T]:
        """The answers, in order; TimeoutError if they take longer than `timeout` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        answers = [self._nothing] * self._size
        for part in self._parts:
            for entry, answer in zip(part.entries, _answers(part, end), strict=False):
                answers[entry] = answer
        return answers

    def cancel(self) -> None:
        """Drop what has not begun; its answer is `nothing`. What has begun goes on."""
        for part in self._parts:
            part.future.cancel()


def _answers(part: TicketPart[T], end: float | None) -> list[T]:
    left = None if end is None else max(0.0, end - time.monotonic())
    try:
        return part.future.result(left)
    except CancelledError:
        return []
