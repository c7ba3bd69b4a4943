"""Attention in its plainest form, what every kernel must compute: float64 torch on any device."""

import torch
from torch import Tensor

from picbench.kernels.paging import GAP
from picbench.kernels.rope import RopeTable


def attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kpos: Tensor,
    rope_shift: Tensor,
    qpos: Tensor,
    rope: RopeTable,
    scale: float,
) -> Tensor:
    """Attention of one request's queries [n, num_heads, head_size], as float64.

    `key` and `value` [slots, num_kv_heads, head_size] are what the cache holds. `kpos` [slots] are
    logical positions (GAP: never visible, and the slot may hold anything) and `rope_shift` [slots]
    is by how much keys are still to be rotated; `qpos` [n] are the positions of the queries, which
    are rotated. A key is visible iff kpos <= qpos. A query that sees nothing gets zeros.
    """
    real = torch.nonzero(kpos != GAP).flatten()
    key = rotate_reference(key[real].double(), rope_shift[real], rope)
    grouped = query.double().view(len(query), key.shape[1], -1, key.shape[2])
    scores = torch.einsum("tkgd,skd->tkgs", grouped, key) * scale
    visible = kpos[real] <= qpos.unsqueeze(1)
    scores = scores.masked_fill(~visible[:, None, None, :], float("-inf"))
    weight = scores.softmax(-1).nan_to_num(0.0)
    return torch.einsum("tkgs,skd->tkgd", weight, value[real].double()).reshape(query.shape)


def rotate_reference(key: Tensor, rope_shift: Tensor, rope: RopeTable) -> Tensor:
    """Keys [n, heads, head_size] in float64, rotated by signed shifts [n]."""
    half = rope.rotary_dim // 2
    column = torch.arange(half)
    first, second = (column, column + half) if rope.is_neox else (2 * column, 2 * column + 1)
    rows = rope.cos_sin_cache[rope_shift.abs().long()].double().unsqueeze(1)
    cos, sin = rows[..., :half], rows[..., half:] * rope_shift.sign().view(-1, 1, 1)
    x, y = key[..., first], key[..., second]
    rotated = key.clone()
    rotated[..., first], rotated[..., second] = x * cos - y * sin, y * cos + x * sin
    return rotated
