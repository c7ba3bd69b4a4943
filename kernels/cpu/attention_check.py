"""One small batch of random keys through an attention on CPU, against the float64 reference.

It has what a serving batch has: a plain request, whose keys are cached with RoPE and read in place,
and planned ones, whose blocks are in any order, with slots that no query sees. Every query head
sees keys of its own, so that heads which are mixed up give other outputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from picbench.kernels.cpu.attention import AttentionBatch, store
from picbench.kernels.cpu.reference import attend_reference
from picbench.kernels.paging import BLOCK_SIZE, GAP, flat_slots
from picbench.kernels.rope import RopeTable, rotate
from picbench.kernels.shape import HeadShape

#: Attention of `query` [tokens, num_heads, head_size] over the cache, into the last argument.
Attend = Callable[[Tensor, Tensor, AttentionBatch, Tensor], None]

#: Largest relative error that passes, by type.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """One request: the logical position of each slot, and how many queries are at the end."""

    positions: tuple[int, ...]
    queries: int
    plain: bool = False

    @property
    def blocks(self) -> int:
        """Blocks of 16 slots."""
        return -(-len(self.positions) // BLOCK_SIZE)


_REQUESTS = (
    CheckedRequest(tuple(range(37)), queries=5, plain=True),
    CheckedRequest((*range(40, 56), *(GAP,) * 4, *range(4, 16), *range(4), *range(16, 40), 56), 29),
    CheckedRequest((*range(16, 28), *(GAP,) * 4, *range(16), *range(28, 33)), queries=1),
)


def attention_error(attend: Attend, shape: HeadShape, rope: RopeTable, scale: float) -> float:
    """The norm of the output's error over the output's own; NaN where the output has some."""
    noise = torch.Generator().manual_seed(0)
    ends = list(accumulate(request.blocks for request in _REQUESTS))
    blocks = ends[-1]
    # In any order, as the blocks of a pool that has been in use are.
    ids = torch.randperm(blocks, generator=noise).to(torch.int32)
    tables = [ids[end - request.blocks : end] for end, request in zip(ends, _REQUESTS, strict=True)]
    size = (blocks, shape.num_kv_heads, BLOCK_SIZE, 2 * shape.head_size)
    bare, cached = torch.zeros((2, *size), dtype=shape.dtype)
    for request, table in zip(_REQUESTS, tables, strict=True):
        _fill(request, table, shape, rope, noise, bare, cached)
    tokens = sum(request.queries for request in _REQUESTS)
    query = torch.randn(tokens, shape.num_heads, shape.head_size, generator=noise).to(shape.dtype)
    step = _step(_REQUESTS, tables, rope)
    plain = [request.plain for request in _REQUESTS]
    batch = AttentionBatch.build(**step, affine=plain, rotated=plain, shape=shape)
    expected = attend_reference(query, bare, **step, scale=scale)
    found = torch.full_like(query, float("nan"))
    attend(query, cached, batch, found)
    return float((found.double() - expected).norm() / expected.norm())


def _fill(
    request: CheckedRequest,
    table: Tensor,
    shape: HeadShape,
    rope: RopeTable,
    noise: torch.Generator,
    bare: Tensor,
    cached: Tensor,
) -> None:
    """Store random keys and values without RoPE in `bare`, and as engines do in `cached`."""
    positions = torch.tensor(request.positions)
    size = (2, len(positions), shape.num_kv_heads, shape.head_size)
    key, value = torch.randn(size, generator=noise).to(shape.dtype)
    slots = flat_slots(table, torch.arange(len(positions)))
    store(key, value, bare, slots)
    if request.plain:
        key = rotate(key, rope.rows(positions), is_neox=rope.is_neox)
    store(key, value, cached, slots)


def _step(
    requests: Sequence[CheckedRequest], tables: Sequence[Tensor], rope: RopeTable
) -> dict[str, Any]:
    """What the reference and `AttentionBatch.build` are both told."""
    kpos = [torch.tensor(request.positions, dtype=torch.int32) for request in requests]
    queries = [request.queries for request in requests]
    return {
        "query_start": [sum(queries[:i]) for i in range(len(queries) + 1)],
        "seq_lens": [len(request.positions) for request in requests],
        "block_table": torch.nn.utils.rnn.pad_sequence(list(tables), batch_first=True),
        "kpos": kpos,
        "qpos": torch.cat([p[-n:] for p, n in zip(kpos, queries, strict=True)]),
        "rope": rope,
    }
