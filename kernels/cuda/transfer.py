"""Moves whole blocks: within a cache for private copies, and between device and host."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


def copy_blocks(kv_cache: Tensor, source: Tensor, target: Tensor) -> None:
    """Copies blocks `source` [n] of a layer's cache to blocks `target` [n], both int64.

    Targets are distinct and no target is a source. Each block is copied with all its heads,
    whatever the cache's strides.
    """
    if len(source):
        _, heads, slots, width = kv_cache.shape
        _copy[(len(source), heads)](
            kv_cache,
            source,
            target,
            kv_cache.stride(0),
            kv_cache.stride(1),
            kv_cache.stride(2),
            slots,
            width,
            SLOTS=triton.next_power_of_2(slots),
            WIDTH=triton.next_power_of_2(width),
        )


@triton.jit
def _copy(
    kv_cache: tl.tensor,
    source: tl.tensor,
    target: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    slot_stride: tl.tensor,
    slots: tl.tensor,
    width: tl.tensor,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    pair = tl.program_id(0)
    slot = tl.arange(0, SLOTS)[:, None]
    dim = tl.arange(0, WIDTH)[None, :]
    inside = (slot < slots) & (dim < width)
    at = tl.program_id(1) * head_stride + slot * slot_stride + dim
    old = tl.load(source + pair).to(tl.int64) * block_stride
    new = tl.load(target + pair).to(tl.int64) * block_stride
    tl.store(kv_cache + new + at, tl.load(kv_cache + old + at, mask=inside), mask=inside)


@dataclass(frozen=True, slots=True)
class Copy:
    """A transfer under way; `wait` makes the current stream wait for it, `join` the host."""

    event: torch.cuda.Event

    def wait(self) -> None:
        """Lets what is launched next on the current stream start after the transfer."""
        self.event.wait()

    def join(self) -> None:
        """Blocks the host until the transfer is done."""
        self.event.synchronize()

    @property
    def done(self) -> bool:
        """Whether the transfer is done; never blocks."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]


class HostCopier:
    """Moves blocks between one device's caches and pinned host memory, on a stream of its own.

    Blocks are staged in one contiguous buffer on the device, `staging_blocks` at a time, so that
    each crossing is one large copy. Transfers of one copier happen in the order of the calls.
    """

    def __init__(self, kv_cache: Tensor, staging_blocks: int = 256) -> None:
        _, heads, slots, width = kv_cache.shape
        shape = (staging_blocks, heads, slots, width)
        self._stream = torch.cuda.Stream(kv_cache.device)  # type: ignore[no-untyped-call]
        self._staging = torch.empty(shape, dtype=kv_cache.dtype, device=kv_cache.device)

    @property
    def nbytes(self) -> int:
        """Device memory held."""
        return self._staging.nbytes

    def to_host(self, kv_cache: Tensor, blocks: Tensor, host: Tensor) -> Copy:
        """Copies `blocks` [n] int64 of `kv_cache` to `host` [n, kv_heads, 16, 2 * head_size].

        `host` is pinned. What the current stream has launched so far happens before the copy.
        """
        return self._move(blocks, lambda part, some: self._out(kv_cache, some, host[part]))

    def to_device(self, host: Tensor, kv_cache: Tensor, blocks: Tensor) -> Copy:
        """Copies `host` to `blocks` of `kv_cache`; the arguments are those of `to_host`."""
        return self._move(blocks, lambda part, some: self._in(host[part], kv_cache, some))

    def _move(self, blocks: Tensor, step: Any) -> Copy:
        self._stream.wait_stream(torch.cuda.current_stream(blocks.device))
        with torch.cuda.stream(self._stream):
            for start in range(0, len(blocks), len(self._staging)):
                part = slice(start, start + len(self._staging))
                step(part, blocks[part])
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return Copy(event)

    def _out(self, kv_cache: Tensor, blocks: Tensor, host: Tensor) -> None:
        staging = self._staging[: len(blocks)]
        torch.index_select(kv_cache, 0, blocks, out=staging)
        host.copy_(staging, non_blocking=True)

    def _in(self, host: Tensor, kv_cache: Tensor, blocks: Tensor) -> None:
        staging = self._staging[: len(blocks)]
        staging.copy_(host, non_blocking=True)
        kv_cache.index_copy_(0, blocks, staging)
