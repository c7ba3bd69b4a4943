"""Compiles the kernels of link before the first request is served.

Triton compiles a kernel when it is first launched, which takes seconds. Decode is compiled when the
engine captures its CUDA graphs; link is in no graph.
"""

import torch
from torch import Tensor

from picbench.kernels.cuda.prefill.link import LinkBatch, LinkRequest, link
from picbench.kernels.cuda.prefill.logical_order import LogicalOrder
from picbench.kernels.cuda.prefill.paged import paged_prefill
from picbench.kernels.cuda.workspace import CudaWorkspace
from picbench.kernels.paging import BLOCK_SIZE
from picbench.kernels.rope import RopeTable
from picbench.kernels.shape import HeadShape

#: Keys of the requests that are linked: so few that they are not split, and so many that they are.
KEYS = (2 * BLOCK_SIZE, 2112)


def warm_up_link(
    rope: RopeTable, shape: HeadShape, workspace: CudaWorkspace, device: torch.device
) -> list[Tensor]:
    """Link made-up requests, one for each way in which kernels are launched; their outputs.

    The made-up cache is laid out as vLLM's is for FlashAttention, slots before heads. In
    another order (VLLM_KV_CACHE_LAYOUT) paged prefill is compiled when it is first needed.
    """
    size = (-(-max(KEYS) // BLOCK_SIZE), BLOCK_SIZE, shape.num_kv_heads, 2 * shape.head_size)
    cache = torch.zeros(size, dtype=shape.dtype, device=device).transpose(1, 2)
    table = torch.arange(size[0], dtype=torch.int32, device=device)[None]
    ways = (True, False) if paged_prefill.covers(shape, rope) else (True,)
    return [
        _linked(keys, cache, table, rope, shape, workspace, copied=copied)
        for copied in ways
        for keys in KEYS
    ]


def _linked(
    keys: int,
    cache: Tensor,
    table: Tensor,
    rope: RopeTable,
    shape: HeadShape,
    workspace: CudaWorkspace,
    *,
    copied: bool,
) -> Tensor:
    slots = torch.arange(keys, dtype=torch.int32)
    # Queries far from each other are runs of one, which tiles serve and FlashAttention does not.
    queries = slots[keys // 4 - 1 :: keys // 4].contiguous()
    order = LogicalOrder.of(slots, torch.zeros_like(slots))
    request = LinkRequest(0, 0, len(queries), order, queries)
    batch = LinkBatch.build([request], table, rope, shape, workspace, copied=copied)
    query = torch.zeros(
        len(queries), shape.num_heads, shape.head_size, dtype=shape.dtype, device=table.device
    )
    return link(query, cache, batch, 1.0, torch.full_like(query, float("nan")))
