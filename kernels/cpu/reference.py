"""What `cpu.attention.attend` must compute, in float64."""

from collections.abc import Sequence

import torch
from torch import Tensor

from picbench.kernels.float64_attention import attention_reference
from picbench.kernels.paging import BLOCK_SIZE, flat_slots, split
from picbench.kernels.rope import RopeTable


def attend_reference(
    query: Tensor,
    kv_cache: Tensor,
    *,
    query_start: Sequence[int],
    seq_lens: Sequence[int],
    block_table: Tensor,
    kpos: Sequence[Tensor],
    qpos: Tensor,
    rope: RopeTable,
    scale: float,
) -> Tensor:
    """Attention of `query` [tokens, num_heads, head_size], as float64 of the same shape.

    The arguments are those of `AttentionBatch.build` and `attend`; keys are cached without RoPE.
    """
    key, value = split(kv_cache)
    out = torch.zeros(query.shape, dtype=torch.float64)
    for i, length in enumerate(seq_lens):
        own = slice(query_start[i], query_start[i + 1])
        slots = flat_slots(block_table[i], torch.arange(length))
        block, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE
        at = kpos[i][:length]
        keys, values = key[block, :, offset], value[block, :, offset]
        out[own] = attention_reference(query[own], keys, values, at, at, qpos[own], rope, scale)
    return out
