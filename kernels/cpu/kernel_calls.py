"""The kernel calls of an engine step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from picbench.kernels.cpu import vllm_ops
from picbench.kernels.cpu.copies import CopyUpdate, KvCopies
from picbench.kernels.cpu.gather import Gather, PagedRequest, runs
from picbench.kernels.cpu.scratch import Workspace, gather_rotated, read_slots
from picbench.kernels.cpu.vllm_ops import Launch
from picbench.kernels.paging import BLOCK_SIZE
from picbench.kernels.rope import RopeTable
from picbench.kernels.shape import HeadShape

# Scratch memory of one pass over some of the heads: small enough to stay in the last-level cache
# between being written and read. Decode is bound by memory, which it would else access three times.
_SCRATCH_BYTES = 4 << 20
# Queries of one call of torch: enough to fill the cores, few enough that most of the invisible keys
# are skipped.
_QUERY_TILE = 256


class KernelCall(Protocol):
    """Attention of some requests of a batch."""

    def run(
        self, query: Tensor, kv_cache: Tensor, workspace: Workspace, scale: float, out: Tensor
    ) -> None:
        """Fills the requests' rows of `out`; the arguments are those of `attend`."""
        ...


@dataclass(frozen=True, slots=True)
class InPlaceCall:
    """vLLM's kernel reads the cache itself: all keys are cached with RoPE."""

    launch: Launch

    @classmethod
    def plan(cls, requests: Sequence[PagedRequest], shape: HeadShape) -> "InPlaceCall":
        """Plain requests that follow each other in the batch."""
        start = requests[0].start
        bounds = [start, *(request.stop for request in requests)]
        launch = Launch.plan(
            start,
            torch.tensor(bounds, dtype=torch.int32) - start,
            torch.tensor([request.length for request in requests], dtype=torch.int32),
            torch.stack([request.table for request in requests]),
            shape,
        )
        return cls(launch)

    def run(
        self, query: Tensor, kv_cache: Tensor, workspace: Workspace, scale: float, out: Tensor
    ) -> None:
        """See `KernelCall.run`."""
        self.launch.read(query, *workspace.halves(kv_cache), scale, out)


@dataclass(frozen=True, slots=True)
class GatheredCall:
    """vLLM's kernel reads a rotated copy of requests, `kv_heads` KV heads at a time."""

    gather: Gather
    launches: Sequence[Launch]
    kv_heads: int

    @classmethod
    def plan(cls, gather: Gather, shape: HeadShape) -> "GatheredCall":
        """At least one key: each request that sees any has a launch, as if it were alone."""
        kv_heads, seen, launches = _heads_a_pass(gather, shape), gather.visible.clamp(min=1), []
        start, every = gather.start, torch.arange(gather.num_blocks, dtype=torch.int32)
        for queries, blocks in gather.several or [(len(seen), every)]:
            if len(blocks):
                query_start, lengths = runs(seen[:queries])
                table = blocks.expand(len(lengths), -1)
                heads = shape.with_kv_heads(kv_heads)
                launches.append(Launch.plan(start, query_start, lengths, table, heads))
            start, seen = start + queries, seen[queries:]
        return cls(gather, launches, kv_heads)

    def run(
        self, query: Tensor, kv_cache: Tensor, workspace: Workspace, scale: float, out: Tensor
    ) -> None:
        """See `KernelCall.run`."""
        group = query.shape[1] // kv_cache.shape[1]
        for first in range(0, kv_cache.shape[1], self.kv_heads):
            last = first + self.kv_heads
            heads = slice(first * group, last * group)
            scratch = gather_rotated(kv_cache[:, first:last], self.gather, workspace)
            for launch in self.launches:
                launch.run(query[:, heads], scratch, scale, out[:, heads])
        if self.gather.blind is not None:
            out[self.gather.blind] = 0


@dataclass(frozen=True, slots=True)
class CopiedCall:
    """vLLM's kernel reads the copies of requests with one query each, which are updated before.

    `fills` are gathers into blocks of the copies. Slots `sources` of the KV cache become slots
    `targets` of the copies, their keys rotated by `rows` (None: not at all), after blocks `fresh`
    are cleared: vLLM's kernel multiplies unused values by zero, so they must be finite.
    """

    copies: KvCopies
    fills: tuple[tuple[Gather, Tensor], ...]
    sources: Tensor
    targets: Tensor
    rows: Tensor | None
    is_neox: bool
    fresh: Tensor
    launch: Launch

    @classmethod
    def plan(
        cls,
        start: int,
        updates: Sequence[CopyUpdate],
        copies: KvCopies,
        rope: RopeTable,
        shape: HeadShape,
    ) -> "CopiedCall":
        """Requests that follow each other in the batch, the first with query `start`."""
        added = [update for update in updates if update.fill is None]
        rotate_by = [update.rotate_by for update in added]
        counts = [update.copy.count for update in updates]
        launch = Launch.plan(
            start,
            torch.arange(len(updates) + 1, dtype=torch.int32),
            torch.tensor(counts, dtype=torch.int32),
            torch.stack([update.copy.table for update in updates]),
            shape,
        )
        return cls(
            copies,
            tuple((u.fill, torch.tensor(u.copy.blocks)) for u in updates if u.fill is not None),
            torch.tensor([update.source for update in added], dtype=torch.int64),
            torch.tensor([update.target for update in added], dtype=torch.int64),
            rope.rows(torch.tensor(rotate_by)) if max(rotate_by, default=-1) >= 0 else None,
            rope.is_neox,
            torch.tensor([u.fresh for u in added if u.fresh is not None], dtype=torch.int64),
            launch,
        )

    def run(
        self, query: Tensor, kv_cache: Tensor, workspace: Workspace, scale: float, out: Tensor
    ) -> None:
        """See `KernelCall.run`."""
        copied = self.copies.layer(kv_cache)
        for gather, blocks in self.fills:
            copied.index_copy_(0, blocks, gather_rotated(kv_cache, gather, workspace))
        if len(self.fresh):
            copied.index_fill_(0, self.fresh, 0)
        if len(self.sources):
            key, value = read_slots(kv_cache, self.sources, self.rows, is_neox=self.is_neox)
            vllm_ops.pack(key, value, copied, self.targets)
        self.launch.run(query, copied, scale, out)


@dataclass(frozen=True, slots=True)
class DenseCall:
    """Torch serves one request, gathered slot by slot, where vLLM's kernels do not."""

    gather: Gather

    def run(
        self, query: Tensor, kv_cache: Tensor, workspace: Workspace, scale: float, out: Tensor
    ) -> None:
        """See `KernelCall.run`."""
        gather = self.gather
        key, value = read_slots(kv_cache, gather.slots, gather.rows, is_neox=gather.is_neox)
        for start in range(gather.start, gather.stop, _QUERY_TILE):
            stop = min(start + _QUERY_TILE, gather.stop)
            visible = gather.visible[start - gather.start : stop - gather.start]
            out[start:stop] = _attend_tile(query[start:stop], key, value, visible, scale)


def _heads_a_pass(gather: Gather, shape: HeadShape) -> int:
    # Several queries take all heads at once: vLLM's kernel needs a contiguous output.
    if gather.stop - gather.start > 1:
        return shape.num_kv_heads
    head_bytes = gather.num_blocks * BLOCK_SIZE * 2 * shape.head_size * shape.dtype.itemsize
    fitting = min(shape.num_kv_heads, max(1, _SCRATCH_BYTES // head_bytes))
    return max(n for n in range(1, fitting + 1) if shape.num_kv_heads % n == 0)


def _attend_tile(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float
) -> Tensor:
    most = int(visible.max())
    if most == 0:
        return torch.zeros_like(query)
    # A query that sees nothing would get NaN: it is shown one key, and its output zeroed.
    mask = torch.arange(most) < visible.clamp(min=1).unsqueeze(1)
    result = F.scaled_dot_product_attention(
        _heads_first(query),
        _heads_first(key[:most]),
        _heads_first(value[:most]),
        attn_mask=mask,
        scale=scale,
        enable_gqa=True,
    )
    return result.squeeze(0).transpose(0, 1) * (visible > 0).view(-1, 1, 1)


def _heads_first(packed: Tensor) -> Tensor:
    return packed.transpose(0, 1).unsqueeze(0)
