"""Copies between a GPU's KV pool and pinned memory, on streams of their own.

Rows are gathered to a staging buffer on the device by one kernel, and cross the link as runs of
consecutive rows: a few large copies by the GPU's copy engines, which take nothing from kernels.
Upstream does without staging and has the driver copy page by page
(vllm/v1/simple_kv_offload/cuda_mem_ops.py): at 64 KiB a page that is 65,536 copies for 32k tokens
of an 8B model.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from picbench.engines.chunk_cache.arena import runs
from picbench.engines.vllm.transfer.copies import Pending, PlainCopies
from picbench.engines.vllm.transfer.pool_rows import PoolRows
from picbench.errors import ConfigError


class Streams:
    """A GPU's queues, and events in them. Tests have queues and events of their own kind."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def steps(self) -> Any:
        """The queue of the engine's steps: the current stream, in which vLLM runs the model."""
        return torch.cuda.current_stream(self._device)

    def open(self) -> Any:
        """A new queue, of the lowest priority: kernels of steps go first."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def run(self, stream: Any, work: Callable[[], object]) -> None:
        """Queue what `work` does."""
        with torch.cuda.stream(stream):
            work()

    def event(self) -> Any:
        """An event, not recorded yet: nothing waits for it."""
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def record(self, event: Any, stream: Any) -> None:
        """The event is reached when what is in a queue now has ended."""
        event.record(stream)

    def wait(self, stream: Any, event: Any) -> None:
        """What is queued later begins after the event, as it was recorded last."""
        stream.wait_event(event)

    def reached(self, event: Any) -> bool:
        """Whether an event was reached; never waits. Raises the device's error, if it has one."""
        reached: bool = event.query()
        return reached

    def finish(self, stream: Any) -> None:
        """Wait for all that is in a queue."""
        stream.synchronize()

    def pin(self, memory: Tensor) -> None:
        """Register memory with the driver, as a whole. Raises ConfigError if it refuses."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if error:
            raise ConfigError(
                f"`tiers`: the driver does not pin {memory.nbytes >> 20} MiB for the host tier "
                f"(error {error})",
                hint="give it less memory, or the process a higher limit (ulimit -l)",
            )

    def unpin(self, memory: Tensor) -> None:
        """Undo `pin`."""
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]

    def pinned(self, pool: PoolRows, rows: int) -> Tensor:
        """Memory of torch's pinned allocator, which keeps it for the next that asks for as much."""
        return pool.empty(rows, pinned=True)


@dataclass(frozen=True, slots=True)
class Staging:
    """How much is staged on the device: bytes of a buffer, and how many there are.

    A step that computes 8,192 tokens of an 8B model makes 1 GiB of KV; so much can be stored
    without a stall. Buffers for stores take at most the `share`-th part of the pool's size.
    """

    buffer: int = 64 << 20
    stores: int = 16
    loads: int = 2
    share: int = 8


@dataclass(frozen=True, slots=True)
class _Buffer:
    """A staging buffer [rows, layers, words], and the stream that copies it over the link.

    `filled` and `free` say, in the order of the streams, that rows were gathered in it, and that
    they have left it.
    """

    rows: Tensor
    stream: Any
    filled: Any
    free: Any


@dataclass(frozen=True, slots=True)
class _Recorded:
    """Copies that have ended once all of these events were reached."""

    streams: Streams
    events: Sequence[Any]

    def done(self) -> bool:
        """Whether they have."""
        return all(map(self.streams.reached, self.events))


class StreamCopies(PlainCopies):
    """Copies of a GPU, each submitted to streams.

    Stores gather in the steps' stream, between two steps, so that blocks may be reused at once:
    what is queued later comes later. The steps wait for the link only if more was gathered than
    the buffers hold.
    """

    def __init__(self, pool: PoolRows, streams: Streams, staging: Staging | None = None) -> None:
        staging = staging or Staging()
        super().__init__(pool)
        self._streams = streams
        self._size = max(1, staging.buffer // pool.row_bytes)
        stores = min(staging.stores, max(1, pool.blocks // staging.share // self._size))
        self._link = streams.open()
        self._stores = [self._buffer(self._link) for _ in range(stores)]
        # Streams of their own, so that one buffer is scattered while another one is filled.
        self._loads = [self._buffer(streams.open()) for _ in range(staging.loads)]
        self._next_store, self._next_load = cycle(self._stores), cycle(self._loads)
        self._marked = streams.event()
        self._lasting: Tensor | None = None

    def lasting_memory(self, rows: int) -> Tensor:
        """See `PlainCopies`; torch's own pinned memory comes in powers of two."""
        memory = self._pool.empty(rows)
        if rows:
            self._streams.pin(memory)
            self._lasting = memory
        return memory

    def passing_memory(self, rows: int) -> Tensor:
        """Memory for a few copies, pinned."""
        return self._streams.pinned(self._pool, rows)

    def warm_up(self) -> None:
        """Load the kernels' code before requests come; the pool stays as it is.

        Its first block is vLLM's own (vllm/v1/core/block_pool.py, null_block).
        """
        memory = self.passing_memory(1)
        self.store([0], memory, [0])
        self.finish()
        self.mark()
        self.load(memory, [0], [0])
        self._streams.run(self._streams.steps(), lambda: self._pool.copy([(0, 0)]))
        self.finish()

    def store(self, blocks: Sequence[int], memory: Tensor, rows: Sequence[int]) -> Pending:
        """Gather blocks in the steps' stream, and copy them over the link in another."""
        queue, steps, pool = self._streams, self._streams.steps(), self._pool
        for begin, end in self._parts(len(blocks)):
            buffer = next(self._next_store)
            queue.wait(steps, buffer.free)
            queue.run(steps, partial(self._move, pool.gather, blocks[begin:end], buffer))
            queue.record(buffer.filled, steps)
            queue.wait(buffer.stream, buffer.filled)
            queue.run(buffer.stream, partial(_cross, buffer.rows, memory, rows[begin:end], True))
            queue.record(buffer.free, buffer.stream)
        return self._recorded([self._link])

    def load(self, memory: Tensor, rows: Sequence[int], blocks: Sequence[int]) -> Pending:
        """Copy rows over the link, and scatter them to blocks."""
        queue, used = self._streams, {}
        for begin, end in self._parts(len(blocks)):
            buffer = next(self._next_load)
            used[id(buffer)] = buffer.stream
            queue.wait(buffer.stream, self._marked)
            queue.run(buffer.stream, partial(_cross, buffer.rows, memory, rows[begin:end], False))
            scatter = partial(self._move, self._pool.scatter, blocks[begin:end], buffer)
            queue.run(buffer.stream, scatter)
        return self._recorded(used.values())

    def mark(self) -> None:
        """Record the steps' stream as it is now."""
        self._streams.record(self._marked, self._streams.steps())

    def finish(self) -> None:
        """Wait for all streams."""
        for buffer in (self._stores[0], *self._loads):
            self._streams.finish(buffer.stream)

    def close(self) -> None:
        """Finish, and unpin the lasting memory."""
        self.finish()
        if self._lasting is not None:
            self._streams.unpin(self._lasting)
            self._lasting = None

    @property
    def workspace_bytes(self) -> int:
        """Of all staging buffers."""
        return sum(buffer.rows.nbytes for buffer in (*self._stores, *self._loads))

    def _buffer(self, stream: Any) -> _Buffer:
        rows = self._pool.empty(self._size, device=str(self._pool.device))
        return _Buffer(rows, stream, self._streams.event(), self._streams.event())

    def _parts(self, rows: int) -> Iterator[tuple[int, int]]:
        """Begin and end of what goes through one buffer at a time."""
        size = self._size
        return ((begin, min(begin + size, rows)) for begin in range(0, rows, size))

    def _move(
        self, move: Callable[[Tensor, Tensor], None], blocks: Sequence[int], buffer: _Buffer
    ) -> None:
        """Gather blocks in a buffer, or scatter them from it."""
        move(self._pool.ids(blocks), buffer.rows[: len(blocks)])

    def _recorded(self, streams: Iterable[Any]) -> _Recorded:
        """An event after what is queued now, in each of the streams."""
        events = []
        for stream in streams:
            events.append(self._streams.event())
            self._streams.record(events[-1], stream)
        return _Recorded(self._streams, events)


def _cross(staged: Tensor, memory: Tensor, rows: Sequence[int], out: bool) -> None:
    """Copies over the link, one a run of rows: `out` of the staging buffer, or into it."""
    for first, at, count in runs(rows):
        near, far = staged[at : at + count], memory[first : first + count]
        target, source = (far, near) if out else (near, far)
        target.copy_(source, non_blocking=True)
