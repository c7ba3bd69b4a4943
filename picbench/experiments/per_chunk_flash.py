"""Decode by FlashAttention-3: one sequence for each segment of keys that share a RoPE shift.

The query is copied once a segment and re-rotated by the opposite of the shift, and the segments'
outputs are merged by their log-sum-exps. Segments are whole visible blocks (the last one of a run
may end early).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from picbench.errors import EngineError
from picbench.kernels.cuda.layout import key_value
from picbench.kernels.cuda.merge import merge
from picbench.kernels.cuda.prefill import flash
from picbench.kernels.cuda.visible_blocks import Ints
from picbench.kernels.paging import BLOCK_SIZE, GAP
from picbench.kernels.rope import RopeTable
from picbench.kernels.shape import HeadShape


@dataclass(frozen=True, slots=True)
class KeySegment:
    """Blocks first .. last of a request, of which the first `slots` slots are visible."""

    first: int
    last: int
    slots: int
    shift: int


def segments_of(kpos: Ints, rope_shift: Ints, most: int) -> list[KeySegment]:
    """Cuts a request's slots [slots] int32 into segments of at most `most` blocks.

    Raises EngineError where a hidden slot precedes a visible one of the same block.
    """
    count = -(-len(kpos) // BLOCK_SIZE)
    shape = (count, BLOCK_SIZE)
    padded = np.full(count * BLOCK_SIZE, GAP, np.int32)
    padded[: len(kpos)] = kpos
    visible = padded.reshape(shape) != GAP
    shift = np.zeros(count * BLOCK_SIZE, np.int32)
    shift[: len(rope_shift)] = rope_shift
    shift = shift.reshape(shape)[np.arange(count), visible.argmax(1)]
    found: list[KeySegment] = []
    for block in range(count):
        seen = int(visible[block].sum())
        if seen == 0:
            continue
        if not visible[block, :seen].all():
            raise EngineError("hidden slots precede visible ones in a block")
        last = found[-1] if found else None
        if (
            last is not None
            and last.last == block
            and last.shift == shift[block]
            and last.slots == (block - last.first) * BLOCK_SIZE
            and block - last.first < most
        ):
            found[-1] = KeySegment(last.first, block + 1, last.slots + seen, last.shift)
        else:
            found.append(KeySegment(block, block + 1, seen, int(shift[block])))
    return found


@dataclass(frozen=True, slots=True)
class SegmentBatch:
    """The segments of a decode step's requests; `owner` [segments] int32 is the request of each."""

    owner: Tensor
    rope_shift: Tensor
    starts: Tensor
    counts: Tensor
    sequences: flash.Runs
    shape: HeadShape
    rope: RopeTable
    query: Tensor
    partial: Tensor

    @classmethod
    def build(
        cls,
        segments: Sequence[Sequence[KeySegment]],
        block_table: Tensor,
        shape: HeadShape,
        rope: RopeTable,
    ) -> "SegmentBatch":
        """Prepares requests with these segments; `block_table` [requests, max_blocks] int32."""
        device = block_table.device
        flat = [(i, segment) for i, own in enumerate(segments) for segment in own]
        counts = np.array([len(own) for own in segments], np.int32)
        starts = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int32)

        def ints(values: Any) -> Tensor:
            return torch.as_tensor(np.asarray(values, np.int32), device=device)

        owner = ints([i for i, _ in flat])
        first = ints([segment.first for _, segment in flat])
        lengths = ints([segment.slots for _, segment in flat])
        width = max(segment.last - segment.first for _, segment in flat)
        index = first[:, None] + torch.arange(width, device=device)
        index = index.clamp(max=block_table.shape[1] - 1)
        table = block_table[owner.long()[:, None], index.long()].contiguous()
        total = len(flat)
        sequences = flash.Runs(
            torch.arange(total + 1, dtype=torch.int32, device=device),
            lengths,
            table,
            1,
            int(lengths.max()),
        ).scheduled(shape, BLOCK_SIZE, splits=1)
        size = (total, shape.num_heads, shape.head_size)
        return cls(
            owner=owner,
            rope_shift=ints([segment.shift for _, segment in flat]),
            starts=ints(starts),
            counts=ints(counts),
            sequences=sequences,
            shape=shape,
            rope=rope,
            query=torch.empty(size, dtype=shape.dtype, device=device),
            partial=torch.empty(size, dtype=shape.dtype, device=device),
        )


def decode_segments(
    query: Tensor, kv_cache: Tensor, batch: SegmentBatch, scale: float, out: Tensor
) -> Tensor:
    """Attention of `query` [requests, num_heads, head_size] over the cache, into `out`."""
    shape = batch.shape
    heads, size = shape.num_heads, shape.head_size
    key, value = key_value(kv_cache)
    _rotate_queries[(len(batch.owner), heads)](
        query,
        batch.owner,
        batch.rope_shift,
        batch.rope.cos_sin_cache,
        batch.query,
        query.stride(0),
        heads,
        SIZE=size,
        ROTARY=batch.rope.rotary_dim,
        num_warps=1,
    )
    lse = batch.sequences.attend(batch.query, key, value, scale, batch.partial, splits=1)
    merge[(len(query), heads)](
        batch.partial,
        lse,
        batch.starts,
        batch.counts,
        out,
        heads * size,
        lse.stride(1),
        lse.stride(0),
        out.stride(0),
        out.stride(1),
        0,
        HEAD=size,
        TILE=8,
        num_warps=1,
    )
    return out


@triton.jit
def _rotate_queries(
    query: tl.tensor,
    owner: tl.tensor,
    rope_shift: tl.tensor,
    cos_sin: tl.tensor,
    rotated: tl.tensor,
    query_stride: tl.tensor,
    heads: tl.tensor,
    SIZE: tl.constexpr,
    ROTARY: tl.constexpr,
) -> None:
    segment = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half: tl.constexpr = ROTARY // 2
    dim = tl.arange(0, SIZE)
    rotates = dim < ROTARY
    paired_dim = tl.where(dim < half, dim + half, tl.where(rotates, dim - half, dim))
    shift = tl.load(rope_shift + segment)
    at = query + tl.load(owner + segment).to(tl.int64) * query_stride + head * SIZE
    own = tl.load(at + dim).to(tl.float32)
    paired = tl.load(at + paired_dim).to(tl.float32) * tl.where(dim < half, 1.0, -1.0)
    row = cos_sin + tl.abs(shift).to(tl.int64) * ROTARY + dim % half
    cos = tl.load(row, mask=rotates, other=1.0).to(tl.float32)
    sin = tl.load(row + half, mask=rotates, other=0.0).to(tl.float32)
    sin = tl.where(shift < 0, -sin, sin)
    result = own * cos + paired * sin
    tl.store(rotated + (segment * heads + head) * SIZE + dim, result.to(rotated.dtype.element_ty))
