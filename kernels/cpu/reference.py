"""Attention in the plainest possible form: float64, one query and one head at a time.

The ground truth of every other kernel here; it shares no code with them but the tile views.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from picbench.kernels.paging import BLOCK_SIZE, GAP, split
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

    The arguments are those of `AttentionBatch.build` and `cpu.attend`.
    """
    out = torch.zeros(query.shape, dtype=torch.float64)
    for i, length in enumerate(seq_lens):
        key, value = _gather(kv_cache, block_table[i], length)
        key = _rotate(key, kpos[i][:length], rope)
        for token in range(query_start[i], query_start[i + 1]):
            seen = (kpos[i][:length] <= qpos[token]) & (kpos[i][:length] != GAP)
            out[token] = _attend_token(query[token].double(), key[seen], value[seen], scale)
    return out


def _gather(kv_cache: Tensor, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    key, value = split(kv_cache)
    where = [(int(table[i // BLOCK_SIZE]), i % BLOCK_SIZE) for i in range(length)]
    return (
        torch.stack([key[block, :, offset] for block, offset in where]).double(),
        torch.stack([value[block, :, offset] for block, offset in where]).double(),
    )


def _rotate(key: Tensor, kpos: Tensor, rope: RopeTable) -> Tensor:
    turned = key.clone()
    half = rope.rotary_dim // 2
    for slot, position in enumerate(kpos.tolist()):
        if position == GAP:
            continue
        row = rope.cos_sin_cache[position].double()
        cos, sin = row[:half], row[half:]
        x, y = key[slot, :, :half], key[slot, :, half : 2 * half]
        turned[slot, :, :half] = x * cos - y * sin
        turned[slot, :, half : 2 * half] = y * cos + x * sin
    return turned


def _attend_token(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    out = torch.zeros_like(query)
    group = query.shape[0] // key.shape[1]
    if len(key) == 0:
        return out
    for head in range(query.shape[0]):
        scores = key[:, head // group] @ query[head] * scale
        out[head] = torch.softmax(scores, dim=0) @ value[:, head // group]
    return out
