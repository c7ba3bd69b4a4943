"""Scratch memory, and copies of a request's keys and values in it, with the keys rotated."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from picbench.kernels.cpu import vllm_ops
from picbench.kernels.cpu.gather import Gather
from picbench.kernels.paging import BLOCK_SIZE, halves, split
from picbench.kernels.rope import rotate


class Workspace:
    """One growing buffer, overwritten by every use, and views of the layers' caches.

    The buffer holds the gathered and rotated KV of one request in one layer while that layer runs.
    One engine needs one; it must not be shared between threads.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._halves: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._buffer.numel()

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor in the buffer; it is valid until the next call."""
        size = prod(shape) * dtype.itemsize
        if size > self.nbytes:
            self._buffer = torch.empty(size, dtype=torch.uint8)
        return self._buffer[:size].view(dtype).view(tuple(shape))

    def halves(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """`paging.halves` of a layer's cache, which is kept as long as the workspace.

        Making these views again took 8 us a layer, 3 % of a decoded token of a small model.
        """
        held = self._halves.get(id(kv_cache))
        if held is None:
            held = self._halves[id(kv_cache)] = (kv_cache, *halves(kv_cache))
        return held[1:]


def gather_rotated(kv_cache: Tensor, gather: Gather, workspace: Workspace) -> Tensor:
    """The keys and values of `gather` as a KV cache of their own, block after block.

    Returns [gather.num_blocks, num_kv_heads, 16, 2 * head_size] in the workspace, in the tile
    layout of `paging`. Values after the last key are zero, because vLLM's kernel multiplies them
    by zero probabilities.
    """
    scratch = workspace.tensor((gather.num_blocks, *kv_cache.shape[1:]), kv_cache.dtype)
    whole = scratch[: len(gather.blocks)]
    loose = scratch[len(gather.blocks) :]
    if len(whole):
        torch.index_select(kv_cache, 0, gather.blocks, out=whole)
        if gather.pages is not None:
            pages = gather.pages.to(kv_cache.dtype)
            (vllm_ops.rotate_tiles if gather.is_neox else _rotate_interleaved)(whole, pages)
    if len(loose):
        key, value = read_slots(kv_cache, gather.slots, gather.rows, is_neox=gather.is_neox)
        vllm_ops.pack(key, value, loose, torch.arange(len(gather.slots)))
    tail = gather.length % BLOCK_SIZE
    if tail:
        split(scratch[-1:])[1][:, :, tail:] = 0
    return scratch


def _rotate_interleaved(blocks: Tensor, pages: Tensor) -> None:
    """`vllm_ops.rotate_tiles` for interleaved pairs, which are neighbouring rows of a tile."""
    count, heads = blocks.shape[:2]
    rotated = blocks.view(count, heads, -1)[:, :, : pages.shape[1]]
    rotated = rotated.view(count, heads, -1, 2, BLOCK_SIZE)
    cos, sin = pages.float().view(count, 2, 1, -1, BLOCK_SIZE).unbind(1)
    first, second = rotated.float().unbind(3)
    pair = (first * cos - second * sin, second * cos + first * sin)
    rotated.copy_(torch.stack(pair, dim=3))


def read_slots(
    kv_cache: Tensor, slots: Tensor, rows: Tensor | None, *, is_neox: bool
) -> tuple[Tensor, Tensor]:
    """Keys and values, [n, num_kv_heads, head_size] each, of flat `slots` [n] of a cache.

    Keys are rotated by `rows` [n, rotary_dim] of a RopeTable; None rotates none.
    """
    key_cache, value_cache = split(kv_cache)
    block, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    key, value = key_cache[block, :, offset], value_cache[block, :, offset]
    return (key if rows is None else rotate(key, rows, is_neox=is_neox)), value
