"""Random requests over a paged cache, as algorithms lay them out."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from picbench.kernels.cuda.layout import key_value
from picbench.kernels.cuda.reference import attend_reference
from picbench.kernels.paging import BLOCK_SIZE, GAP, flat_slots
from picbench.kernels.rope import RopeTable
from picbench.kernels.shape import HeadShape


@dataclass(frozen=True, slots=True)
class Slots:
    """A request's slots in compute order: `kpos` and `rope_shift` [slots] int32 on the CPU.

    `computed` counts the last slots, which the request computes itself.
    """

    kpos: Tensor
    rope_shift: Tensor
    computed: int

    @property
    def blocks(self) -> int:
        """Blocks that the slots take."""
        return -(-len(self.kpos) // BLOCK_SIZE)

    @property
    def end(self) -> int:
        """Logical positions in use."""
        return int(self.kpos[self.kpos != GAP].max()) + 1


def planned(
    chunks: Sequence[int],
    *,
    linked: int,
    text: int,
    anchor: int = 0,
    unrotated: bool = False,
) -> Slots:
    """A request of chunks, then `text` tokens; the first `linked` tokens of each are recomputed.

    Chunks were compiled after `anchor` tokens. Blocks without a visible slot are left out.
    """
    kpos, rope_shift, computed, start = [], [], [], 0
    for length in chunks:
        own = torch.arange(start, start + length, dtype=torch.int32)
        computed.append(own[:linked])
        canonical = torch.full((-(-length // BLOCK_SIZE) * BLOCK_SIZE,), GAP, dtype=torch.int32)
        canonical[min(linked, length) : length] = own[linked:]
        canonical = canonical[min(linked, length) // BLOCK_SIZE * BLOCK_SIZE :]
        kpos.append(canonical)
        rope_shift.append(torch.full_like(canonical, start - anchor))
        start += length
    computed.append(torch.arange(start, start + text, dtype=torch.int32))
    own = torch.cat(computed)
    positions = torch.cat([*kpos, own])
    shift = torch.cat([*rope_shift, torch.zeros_like(own)])
    return Slots(positions, positions.clone() if unrotated else shift, len(own))


def plain(length: int, new: int) -> Slots:
    """A request without chunks, whose last `new` tokens are computed now."""
    kpos = torch.arange(length, dtype=torch.int32)
    return Slots(kpos, torch.zeros_like(kpos), new)


@dataclass(frozen=True, slots=True)
class Scene:
    """Requests over one layer's cache: `table` [requests, blocks] int32, all on the device."""

    shape: HeadShape
    rope: RopeTable
    requests: tuple[Slots, ...]
    table: Tensor
    kv_cache: Tensor

    @property
    def scale(self) -> float:
        """1 / sqrt(head size)."""
        return float(self.shape.head_size**-0.5)

    @property
    def lengths(self) -> Tensor:
        """Slots of each request [requests] int32."""
        counts = [len(request.kpos) for request in self.requests]
        return torch.tensor(counts, dtype=torch.int32, device=self.table.device)

    def queries(self, count: int, seed: int = 1) -> Tensor:
        """Random queries [count, num_heads, head_size]."""
        generator = torch.Generator(self.table.device).manual_seed(seed)
        size = (count, self.shape.num_heads, self.shape.head_size)
        drawn = torch.randn(size, generator=generator, device=self.table.device)
        return drawn.to(self.shape.dtype)

    def expected(self, index: int, query: Tensor, qpos: Tensor) -> Tensor:
        """The reference's answer to queries of request `index`."""
        request, device = self.requests[index], self.table.device
        return attend_reference(
            query,
            self.kv_cache,
            self.table[index],
            request.kpos.to(device),
            request.rope_shift.to(device),
            qpos.to(device),
            self.rope,
            self.scale,
        )


def draw(
    requests: Sequence[Slots],
    shape: HeadShape,
    rope: RopeTable,
    *,
    device: torch.device | str,
    seed: int = 0,
    head_major: bool = False,
    poison: bool = False,
) -> Scene:
    """Fills a cache with random keys and values; requests own their blocks, which are scattered.

    With `poison`, everything that no query may read is NaN.
    """
    generator = torch.Generator(device).manual_seed(seed)
    counts = [request.blocks for request in requests]
    total = sum(counts) + 1
    order = torch.randperm(total, generator=generator, device=device).int()
    table = torch.zeros(len(requests), max(counts), dtype=torch.int32, device=device)
    at = 0
    for row, count in zip(table, counts, strict=True):
        row[:count] = order[at : at + count]
        at += count
    return filled(requests, table, total, shape, rope, generator, head_major, poison)


def filled(
    requests: Sequence[Slots],
    table: Tensor,
    total: int,
    shape: HeadShape,
    rope: RopeTable,
    generator: torch.Generator,
    head_major: bool,
    poison: bool,
) -> Scene:
    """A scene over a random cache of `total` blocks, of which `table` names those of requests."""
    inner = (shape.num_kv_heads, BLOCK_SIZE) if head_major else (BLOCK_SIZE, shape.num_kv_heads)
    size = (total, *inner, 2 * shape.head_size)
    memory = torch.empty(size, dtype=shape.dtype, device=table.device)
    memory.normal_(generator=generator)
    kv_cache = memory if head_major else memory.transpose(1, 2)
    if poison:
        _poison(kv_cache, requests, table)
    return Scene(shape, rope, tuple(requests), table, kv_cache)


def _poison(kv_cache: Tensor, requests: Sequence[Slots], table: Tensor) -> None:
    hidden = torch.ones(kv_cache.shape[0] * BLOCK_SIZE, dtype=torch.bool, device=table.device)
    for request, row in zip(requests, table, strict=True):
        real = torch.nonzero(request.kpos != GAP).flatten().to(table.device)
        hidden[flat_slots(row, real)] = False
    slots = torch.nonzero(hidden).flatten()
    for half in key_value(kv_cache):
        half[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = float("nan")


def rope_table(
    rotary_dim: int,
    positions: int,
    device: torch.device | str,
    *,
    is_neox: bool = True,
) -> RopeTable:
    """A rotary table in float32 without scaling, of Llama 3's base."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / rotary_dim
    angles = torch.arange(positions, device=device).unsqueeze(1) * 500_000.0**-exponents
    table = torch.cat([angles.cos(), angles.sin()], dim=-1).float()
    return RopeTable(table, rotary_dim, is_neox)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what was expected; NaN stays NaN."""
    return float((found.double() - expected).norm() / expected.norm())
