"""Copies of rows between the KV pool and the host's memory: the interface, and a CPU's copies."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from picbench.engines.chunk_cache.arena import runs
from picbench.engines.vllm.transfer.pool_rows import PoolRows


class Pending(Protocol):
    """What a transfer waits for: a copy that was submitted, or a tier's answer."""

    def done(self) -> bool:
        """Whether it has ended; never waits."""
        ...


class Done:
    """What had ended when it was submitted."""

    def done(self) -> bool:
        """True."""
        return True


class PlainCopies:
    """Copies rows in the order of the steps that make and use them, without waiting for them.

    A store reads blocks as they are after what was queued for the device before, and before what is
    queued later: its blocks may be reused at once. A load begins after what was queued for the
    device before the last `mark`; its blocks must be left alone until it is done. Memory must be
    left alone until a copy from or to it is done.

    These are for pools in the host's memory, where steps have ended when they return, and copies
    when they were submitted. `StreamCopies` are a GPU's.
    """

    def __init__(self, pool: PoolRows) -> None:
        self._pool = pool

    def lasting_memory(self, rows: int) -> Tensor:
        """Lasting memory [rows, layers, words]. Raises ConfigError if there is not so much."""
        return self._pool.empty(rows)

    def passing_memory(self, rows: int) -> Tensor:
        """Memory for a few copies [rows, layers, words]."""
        return self._pool.empty(rows)

    def store(self, blocks: Sequence[int], memory: Tensor, rows: Sequence[int]) -> Pending:
        """Copy blocks of the pool to as many rows of `memory`."""
        ids = self._pool.ids(blocks)
        for first, begin, count in runs(rows):
            self._pool.gather(ids[begin : begin + count], memory[first : first + count])
        return Done()

    def load(self, memory: Tensor, rows: Sequence[int], blocks: Sequence[int]) -> Pending:
        """Copy rows of `memory` to as many blocks of the pool."""
        ids = self._pool.ids(blocks)
        for first, begin, count in runs(rows):
            self._pool.scatter(ids[begin : begin + count], memory[first : first + count])
        return Done()

    def mark(self) -> None:
        """Loads that are submitted later begin after what was queued until now."""

    def finish(self) -> None:
        """Wait for all copies."""

    def close(self) -> None:
        """Finish, and give up the lasting memory."""

    @property
    def workspace_bytes(self) -> int:
        """Memory of the device that copies take."""
        return 0
