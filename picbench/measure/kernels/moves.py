"""Block copies on the device, and crossings between device and host."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from picbench.kernels.cuda.store import store
from picbench.kernels.cuda.transfer import Copy, HostCopier, copy_blocks
from picbench.kernels.shape import HeadShape
from picbench.measure.kernels.timing import Spread, elapsed, interleave

_BLOCKS = 16384
_CROSSING = 2048


def measure(shape: HeadShape, rounds: int, seed: int) -> Iterator[dict[str, Any]]:
    """One row for each kind of move; bytes count what is read and what is written."""
    kv_cache = _cache(shape)
    order = torch.randperm(2 * _BLOCKS, device="cuda")
    source, target = order[:_BLOCKS], order[_BLOCKS:]
    arms = {
        "copy blocks": lambda: copy_blocks(kv_cache, source, target),
        "store": _store(shape, kv_cache, order),
    }
    samples = interleave(arms, rounds, seed)
    block = kv_cache[0].numel() * kv_cache.itemsize
    for what, times in samples.items():
        yield _row(what, _BLOCKS, 2 * _BLOCKS * block, times)
    yield from _crossings(kv_cache, source[:_CROSSING], rounds, block)


def _cache(shape: HeadShape) -> Tensor:
    size = (2 * _BLOCKS, 16, shape.num_kv_heads, 2 * shape.head_size)
    return torch.randn(size, device="cuda", dtype=shape.dtype).transpose(1, 2)


def _store(shape: HeadShape, kv_cache: Tensor, order: Tensor) -> Any:
    tokens = 16 * _BLOCKS
    size = (2, tokens, shape.num_kv_heads, shape.head_size)
    key, value = torch.randn(size, device="cuda", dtype=shape.dtype)
    slots = (order[:_BLOCKS, None] * 16 + torch.arange(16, device="cuda")).flatten()
    return lambda: store(key, value, kv_cache, slots)


def _crossings(
    kv_cache: Tensor, blocks: Tensor, rounds: int, block: int
) -> Iterator[dict[str, Any]]:
    host = torch.empty(len(blocks), *kv_cache.shape[1:], dtype=kv_cache.dtype, pin_memory=True)
    copier = HostCopier(kv_cache)
    crossings = {
        "device to host": lambda: copier.to_host(kv_cache, blocks, host),
        "host to device": lambda: copier.to_device(host, kv_cache, blocks),
    }
    for what, cross in crossings.items():
        times = [elapsed(partial(_finish, cross)) for _ in range(rounds)]
        yield _row(what, len(blocks), len(blocks) * block, times)


def _finish(cross: Callable[[], Copy]) -> None:
    cross().wait()


def _row(what: str, blocks: int, moved: int, times: list[float]) -> dict[str, Any]:
    spread = asdict(Spread.of(times))
    return {"kind": "moves", "what": what, "blocks": blocks, "bytes": moved, "ms": spread}
