"""Compiles the kernels of planned requests before the first request is served.

Triton compiles a kernel when it is first launched, which takes seconds, and once more for arguments
of which something else may be assumed: that an integer is 1 or divisible by 16, that a pointer is
aligned. Arguments that depend on the step are exempt from that (`do_not_specialize`), so the ways
below are all that there are for an engine's heads, type and cache layout. CUDA graphs hold some of
these kernels, but not all, and engines without graphs have none.
"""

import torch
from torch import Tensor

from picbench.kernels.cuda.decode.attention import DecodeBatch
from picbench.kernels.cuda.prefill.link import LinkBatch, LinkRequest, link
from picbench.kernels.cuda.prefill.logical_order import LogicalOrder
from picbench.kernels.cuda.prefill.paged import paged_prefill
from picbench.kernels.cuda.workspace import CudaWorkspace
from picbench.kernels.paging import BLOCK_SIZE
from picbench.kernels.rope import RopeTable
from picbench.kernels.shape import HeadShape

#: Keys of the requests that are linked: so few that they are not split, and so many that they are.
KEYS = (2 * BLOCK_SIZE, 2112)


def warm_up_decode(kv_cache: Tensor, batch: DecodeBatch) -> Tensor:
    """Decode one made-up request; its output [1, num_heads, head_size].

    `kv_cache` [num_blocks, num_kv_heads, 16, 2 * head_size] is that of any layer; only its first
    block is read. The request table of `batch` must be empty.
    """
    zero = torch.zeros(1, 1, dtype=torch.int32, device=kv_cache.device)
    batch.fill(zero, zero[0], torch.ones_like(zero[0]))
    query = _queries(1, batch.shape, kv_cache.device)
    return batch.attend(query, kv_cache, 1.0, torch.full_like(query, float("nan")))


def warm_up_link(
    kv_cache: Tensor, rope: RopeTable, shape: HeadShape, workspace: CudaWorkspace
) -> list[Tensor]:
    """Link made-up requests, one for each way in which kernels are launched; their outputs.

    `kv_cache` [num_blocks, num_kv_heads, 16, 2 * head_size] is that of any layer: kernels are
    compiled for its layout. Nothing is written to it, and only its first block is read.
    """
    blocks = -(-max(KEYS) // BLOCK_SIZE)
    table = torch.zeros(1, blocks, dtype=torch.int32, device=kv_cache.device)
    ways = (True, False) if paged_prefill.covers(shape, rope) else (True,)
    return [
        _linked(keys, kv_cache, table, rope, shape, workspace, copied=copied)
        for copied in ways
        for keys in KEYS
    ]


def _linked(
    keys: int,
    kv_cache: Tensor,
    table: Tensor,
    rope: RopeTable,
    shape: HeadShape,
    workspace: CudaWorkspace,
    *,
    copied: bool,
) -> Tensor:
    slots = torch.arange(keys, dtype=torch.int32)
    # Queries far from each other are runs of one, which tiles serve and FlashAttention does not.
    at = slots[keys // 4 - 1 :: keys // 4].contiguous()
    order = LogicalOrder.of(slots, torch.zeros_like(slots))
    request = LinkRequest(0, 0, len(at), order, at)
    batch = LinkBatch.build([request], table, rope, shape, workspace, copied=copied)
    query = _queries(len(at), shape, table.device)
    return link(query, kv_cache, batch, 1.0, torch.full_like(query, float("nan")))


def _queries(count: int, shape: HeadShape, device: torch.device) -> Tensor:
    return torch.zeros(count, shape.num_heads, shape.head_size, dtype=shape.dtype, device=device)
