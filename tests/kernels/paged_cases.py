"""Paged batches for the attention tests: layouts, poisoned caches and expected outputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from picbench.kernels.cpu.attention import AttentionBatch, attend, store
from picbench.kernels.cpu.reference import attend_reference
from picbench.kernels.paging import BLOCK_SIZE, GAP
from picbench.kernels.rope import RopeTable, rotate
from picbench.kernels.shape import HeadShape

#: Runs a test on vLLM's kernels, where they are installed, and on plain torch.
BACKENDS = pytest.mark.parametrize(
    "use_vllm",
    [
        pytest.param(True, marks=pytest.mark.skipif(find_spec("vllm") is None, reason="no vllm")),
        False,
    ],
    ids=["vllm", "torch"],
)

#: Relative error of the whole output, by type.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Layout:
    """One request: logical position of each slot, block of each 16 slots, queries at the end.

    `rotated` is the slots whose keys are stored rotated, as in `AttentionBatch.build`.
    """

    kpos: list[int]
    queries: int
    blocks: list[int]
    affine: bool = False
    rotated: bool | Tensor = False


@dataclass(frozen=True)
class PagedCase:
    """A batch of requests over a cache in which everything unused is NaN."""

    shape: HeadShape
    rope: RopeTable
    layouts: tuple[Layout, ...]
    query: Tensor
    kv_cache: Tensor

    @property
    def description(self) -> dict[str, Any]:
        """The arguments that the reference and `AttentionBatch.build` share."""
        counts = [layout.queries for layout in self.layouts]
        width = max(len(layout.blocks) for layout in self.layouts)
        tables = [layout.blocks + [0] * (width - len(layout.blocks)) for layout in self.layouts]
        kpos = [torch.tensor(layout.kpos, dtype=torch.int32) for layout in self.layouts]
        last = [positions[-n:] for positions, n in zip(kpos, counts, strict=True)]
        return {
            "query_start": [sum(counts[:i]) for i in range(len(counts) + 1)],
            "seq_lens": [len(layout.kpos) for layout in self.layouts],
            "block_table": torch.tensor(tables, dtype=torch.int32),
            "kpos": kpos,
            "qpos": torch.cat(last),
            "rope": self.rope,
        }

    @property
    def scale(self) -> float:
        """1 / sqrt(head size)."""
        return float(self.shape.head_size**-0.5)

    def build(self, use_vllm: bool | None = None) -> AttentionBatch:
        """The batch under test."""
        return AttentionBatch.build(
            **self.description,
            affine=[layout.affine for layout in self.layouts],
            rotated=[layout.rotated for layout in self.layouts],
            shape=self.shape,
            use_vllm=use_vllm,
        )

    def run(self, use_vllm: bool | None = None) -> Tensor:
        """Attention under test, into an output that was NaN."""
        out = torch.full_like(self.query, float("nan"))
        batch = self.build(use_vllm)
        return attend(self.query, self.kv_cache, batch, self.scale, out)

    def expected(self) -> Tensor:
        """The reference's output, for keys cached without RoPE."""
        assert all(layout.rotated is False for layout in self.layouts)
        return attend_reference(self.query, self.kv_cache, **self.description, scale=self.scale)


def rope_table(
    rotary_dim: int,
    dtype: torch.dtype = torch.float32,
    length: int = 512,
    *,
    is_neox: bool = True,
) -> RopeTable:
    """A plain rotary table, base 10,000."""
    frequencies = 10_000.0 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = torch.arange(length).unsqueeze(1) * frequencies
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    return RopeTable(table.to(dtype), rotary_dim, is_neox)


def make_case(
    layouts: Sequence[Layout],
    shape: HeadShape,
    seed: int = 0,
    rope: RopeTable | None = None,
) -> PagedCase:
    """Fills a poisoned cache with random keys and values for these layouts.

    A block that occurs twice holds one set of keys. Slots at GAP stay NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    rope = rope or rope_table(shape.head_size, shape.dtype)
    blocks = 2 + max(block for layout in layouts for block in layout.blocks)
    size = (blocks, shape.num_kv_heads, BLOCK_SIZE, 2 * shape.head_size)
    kv_cache = torch.full(size, float("nan"), dtype=shape.dtype)
    for layout in layouts:
        _fill(kv_cache, layout, shape, rope, generator)
    tokens = sum(layout.queries for layout in layouts)
    query = torch.randn(tokens, shape.num_heads, shape.head_size, generator=generator)
    return PagedCase(shape, rope, tuple(layouts), query.to(shape.dtype), kv_cache)


def _fill(
    kv_cache: Tensor,
    layout: Layout,
    shape: HeadShape,
    rope: RopeTable,
    generator: torch.Generator,
) -> None:
    kpos = torch.tensor(layout.kpos)
    key, value = (
        torch.randn(len(kpos), shape.num_kv_heads, shape.head_size, generator=generator)
        for _ in range(2)
    )
    stored_at = torch.where(stored_rotated(layout) & (kpos != GAP), kpos, -1)
    key = rotate(key, rope.rows(stored_at), is_neox=rope.is_neox)
    slots = slots_of(layout)
    slots[kpos == GAP] = -1
    store(key.to(shape.dtype), value.to(shape.dtype), kv_cache, slots)


def stored_rotated(layout: Layout) -> Tensor:
    """`layout.rotated` slot by slot."""
    if isinstance(layout.rotated, Tensor):
        return layout.rotated
    return torch.full((len(layout.kpos),), layout.rotated)


def slots_of(layout: Layout) -> Tensor:
    """The flat cache slot of each of the layout's slots."""
    table = torch.tensor(layout.blocks)
    order = torch.arange(len(layout.kpos))
    return table[order // BLOCK_SIZE] * BLOCK_SIZE + order % BLOCK_SIZE


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what was expected; NaN stays NaN."""
    expected = expected.double()
    return float((found.double() - expected).norm() / expected.norm())
