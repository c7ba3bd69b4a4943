"""Stores and loads of chunks, stage by stage: through the host's memory, and on to far tiers."""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import numpy as np
from torch import Tensor

from picbench.engines.chunk_cache.arena import Arena, Extent, runs
from picbench.engines.chunk_cache.tiers.backends.host import Host
from picbench.engines.chunk_cache.tiers.envelope import copy_bytes
from picbench.engines.chunk_cache.tiers.guarded_tier import Counters
from picbench.engines.chunk_cache.tiers.stack import (
    BackgroundPool,
    Budget,
    Fetched,
    Ticket,
    TierStack,
)
from picbench.engines.chunk_cache.transfers import ChunkLoad
from picbench.engines.planning.keys import Key
from picbench.engines.vllm.transfer.copies import Pending, PlainCopies

T = TypeVar("T")


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


#: Bytes on their way to far tiers that no host tier holds.
_PASSING = 256 << 20

#: Seconds that copies from far tiers may take when the engine closes.
_CLOSING = 5.0


#: A chunk that was to be loaded, and the tier that had it; None if none did.
Served = tuple[ChunkLoad, str | None]


@dataclass(frozen=True, slots=True)
class _Room:
    """Rows of the host's memory for a chunk; without an `extent` they are only passed through.

    `budget` is what they take of the bytes that may pass through.
    """

    memory: Tensor
    rows: Sequence[int]
    extent: Extent | None = None
    budget: int = 0

    def parts(self) -> list[memoryview]:
        """The rows' bytes, runs of consecutive rows as one."""
        found = (self.memory[first : first + count] for first, _, count in runs(self.rows))
        return [part.numpy().reshape(-1).view(np.uint8).data for part in found]


class ChunkTransfers:
    """Moves chunks between the pool and the tiers, the host's memory being the nearest.

    A chunk is stored by copying its rows to the host tier, or where there is none to memory that
    they pass through; far tiers read them from there in the background. A load copies rows of the
    host tier; what a far tier had is first copied to the host tier, or passes through. Nothing is
    sealed on its way to the host tier, because it does not leave the process.

    `timed` is the scope of work that steps wait for, `evicted` is that of `Arena`.
    """

    def __init__(
        self,
        copies: PlainCopies,
        stack: TierStack,
        row_bytes: int,
        capacity: int,
        timed: Callable[[], AbstractContextManager[None]],
        evicted: Callable[[Key], None] = lambda _: None,
    ) -> None:
        self._copies = copies
        self._stack = stack
        self._row_bytes = row_bytes
        self._timed = timed
        self.arena = Arena(capacity, row_bytes, evicted) if capacity else None
        self._memory = copies.lasting_memory(self.arena.rows) if self.arena else None
        self._background = BackgroundPool("tier-copy", 1)
        self._passing = Budget(_PASSING)

    def counters(self) -> dict[str, Counters]:
        """What each tier did since the engine started, by name, nearest first."""
        nearest = {Host.kind: self.arena.counters()} if self.arena else {}
        return nearest | self._stack.counters()

    def holds(self, name: Key) -> bool:
        """Whether the host tier has a chunk."""
        return self.arena is not None and name in self.arena

    def look_up(self, names: Sequence[Key]) -> Ticket[str | None]:
        """Per chunk the nearest of the far tiers that has it, as far as it says."""
        return self._stack.lookup(names)

    def clear(self, names: Sequence[Key]) -> Ticket[None]:
        """Delete chunks from all tiers; the host tier forgets all that it has.

        Far tiers may have them until the ticket is done.
        """
        if self.arena is not None:
            self.arena.clear()
        return self._stack.delete(names)

    def erase(self, names: Sequence[Key], failed: list[str]) -> Ticket[None]:
        """Delete chunks from all tiers, with what their rows hold; see `TierStack.delete`."""
        if self.arena is not None and self._memory is not None:
            self._memory[self.arena.erase(names)] = 0
        return self._stack.delete(names, failed)

    def close(self) -> None:
        """Finish what takes seconds at most, and close the far tiers."""
        self._stack.close()
        self._background.drain(_CLOSING)

    def store(self, name: Key, blocks: Sequence[int], stored: Callable[[], None]) -> Stages[bool]:
        """Store the rows of `blocks`, read when the first stage is run; whether a tier has them.

        `stored` is called as soon as one does; the answer comes once far tiers have ended.
        """
        if self.arena is not None and self.arena.touch(name):
            stored()
            return True
        room = self._room(name, len(blocks), passing=len(self._stack) > 0)
        if room is None:
            return False
        try:
            yield from self._copy(partial(self._copies.store, blocks, room.memory, room.rows))
            if self._commit(room):
                stored()
            if len(self._stack):
                ticket = self._stack.store([(name, room.parts())], copy=False)
                yield ticket
                if ticket.result()[0]:
                    if room.extent is None:
                        stored()
                    return True
            # The host tier may have been cleared while far tiers went on.
            return room.extent is not None and self.holds(name)
        finally:
            self._leave(room)

    def load(self, chunks: Sequence[tuple[Key, ChunkLoad]]) -> list[Stages[Served]]:
        """Stages of loads, in any order; each returns what became of its chunk."""
        far = [(name, chunk) for name, chunk in chunks if not self.holds(name)]
        ticket = self._stack.fetch([(name, c.size * self._row_bytes) for name, c in far])
        stages = [self._from_far(*each, ticket, index) for index, each in enumerate(far)]
        for name, chunk in chunks:
            # Rows that are found are held from now on.
            if self.arena and (extent := self.arena.find(name, len(chunk.pages))) is not None:
                stages.append(self._from_host(extent, chunk))
        return stages

    def _from_host(self, extent: Extent, chunk: ChunkLoad) -> Stages[Served]:
        assert self._memory is not None
        room = _Room(self._memory, extent.rows, extent)
        try:
            yield from self._write(room, chunk)
            return chunk, Host.kind
        finally:
            self._leave(room)

    def _from_far(
        self, name: Key, chunk: ChunkLoad, ticket: Ticket[Fetched | None], index: int
    ) -> Stages[Served]:
        yield ticket
        fetched = ticket.result()[index]
        if fetched is None:
            return chunk, None
        room = self._room(name, chunk.size) or self._passing_room(chunk.size)
        try:
            parts = room.parts()
            filled = self._background.run(1, False, [[0]], lambda _: [_fill(parts, fetched.data)])
            yield filled
            if not filled.result()[0]:
                return chunk, None
            self._commit(room)
            yield from self._write(room, chunk)
            return chunk, fetched.tier
        finally:
            self._leave(room)

    def _write(self, room: _Room, chunk: ChunkLoad) -> Stages[None]:
        rows = [room.rows[page] for page in chunk.pages]
        return self._copy(partial(self._copies.load, room.memory, rows, chunk.blocks))

    def _copy(self, submit: Callable[[], Pending]) -> Stages[None]:
        try:
            with self._timed():
                copy = submit()
            yield copy
        except Exception:
            # Some of it may be under way; then its rows must not be used for something else.
            self._copies.finish()
            raise

    def _room(self, name: Key, rows: int, *, passing: bool = False) -> _Room | None:
        """Rows of the host tier, else with `passing` memory to pass through, if little is in it."""
        if self.arena is not None and name not in self.arena and not self.arena.is_filling(name):
            extent = self.arena.reserve(name, rows)
            if extent is not None:
                assert self._memory is not None
                return _Room(self._memory, extent.rows, extent)
        nbytes = rows * self._row_bytes
        if passing and self._passing.take(nbytes):
            return self._passing_room(rows, nbytes)
        return None

    def _passing_room(self, rows: int, budget: int = 0) -> _Room:
        return _Room(self._copies.passing_memory(rows), range(rows), None, budget)

    def _commit(self, room: _Room) -> bool:
        """Rows were filled; whether they are the host tier's."""
        if self.arena is not None and room.extent is not None:
            self.arena.commit(room.extent)
        return room.extent is not None

    def _leave(self, room: _Room) -> None:
        if self.arena is not None and room.extent is not None:
            room.memory[list(self.arena.release(room.extent))] = 0
        self._passing.give(room.budget)


def _fill(parts: Sequence[memoryview], value: memoryview) -> bool:
    begin = 0
    for part in parts:
        copy_bytes(part, value[begin : begin + part.nbytes])
        begin += part.nbytes
    return True
