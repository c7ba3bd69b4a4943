"""A GPU's streams, for copies between its KV pool and pinned memory."""

from collections.abc import Callable

import torch
from torch import Tensor

from picbench.engines.vllm.transfer.pool_rows import PoolRows
from picbench.errors import ConfigError


class CudaStreams:
    """See `Streams` in engines/vllm/transfer/stream_copies.py."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def steps(self) -> torch.cuda.Stream:
        """The current stream: that in which vLLM runs the model."""
        return torch.cuda.current_stream(self._device)

    def open(self) -> torch.cuda.Stream:
        """A stream of the lowest priority: kernels of steps go first."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def run(self, stream: torch.cuda.Stream, work: Callable[[], object]) -> None:
        """See `Streams.run`."""
        with torch.cuda.stream(stream):
            work()

    def event(self) -> torch.cuda.Event:
        """See `Streams.event`."""
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def record(self, event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        """See `Streams.record`."""
        event.record(stream)

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """See `Streams.wait`."""
        stream.wait_event(event)

    def reached(self, event: torch.cuda.Event) -> bool:
        """See `Streams.reached`; raises the device's error, if it has one."""
        reached: bool = event.query()  # type: ignore[no-untyped-call]
        return reached

    def finish(self, stream: torch.cuda.Stream) -> None:
        """See `Streams.finish`."""
        stream.synchronize()

    def pin(self, memory: Tensor) -> None:
        """Register memory with the driver, as a whole."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if error:
            raise ConfigError(
                f"`tiers`: the driver does not pin {memory.nbytes >> 20} MiB for the host tier "
                f"(error {error})",
                hint="give it less memory, or the process a higher limit (ulimit -l)",
            )

    def unpin(self, memory: Tensor) -> None:
        """See `Streams.unpin`."""
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]

    def pinned(self, pool: PoolRows, rows: int) -> Tensor:
        """Memory of torch's pinned allocator, which keeps it for the next that asks for as much."""
        return pool.empty(rows, pinned=True)
