"""Transfers of several stages that no step waits for: each goes on with them where it can."""

from collections.abc import Generator, Iterable
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class Pending(Protocol):
    """What a transfer waits for: a copy, or a tier's answer."""

    def done(self) -> bool:
        """Whether it has ended; never waits."""
        ...


#: Yields what has to end before it goes on, and returns its result.
Stages = Generator[Pending, None, T]


class TransferTask(Generic[T]):
    """Runs the stages of a transfer one after the other, each once the one before has ended."""

    def __init__(self, stages: Stages[T]) -> None:
        self._stages = stages
        self._pending: Pending | None = None
        self._results: list[T] = []
        self._error: Exception | None = None

    def advance(self) -> bool:
        """Go on without waiting; whether the transfer has ended, be it with an exception."""
        while not self.ended:
            try:
                if self._waits():
                    return False
                self._pending = next(self._stages)
            except StopIteration as end:
                self._results.append(end.value)
            except Exception as error:
                self._error = error
        return True

    @property
    def ended(self) -> bool:
        """Whether nothing is left to do."""
        return bool(self._results) or self._error is not None

    def result(self) -> T:
        """What the stages returned; raises what they raised."""
        if self._error is not None:
            raise self._error
        return self._results[0]

    def _waits(self) -> bool:
        """Whether what the transfer waits for goes on; the stages get what that raises."""
        try:
            return self._pending is not None and not self._pending.done()
        except Exception as error:
            self._pending = self._stages.throw(error)
            return True


def advance_all(tasks: Iterable[TransferTask[T]]) -> bool:
    """Go on with all of them; whether all have ended."""
    ended = [task.advance() for task in tasks]
    return all(ended)
