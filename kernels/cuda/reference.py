"""What every kernel of this package must compute, in float64 and plain torch, on any device."""

import torch
from torch import Tensor

from picbench.kernels.cuda.layout import key_value
from picbench.kernels.paging import GAP, flat_slots
from picbench.kernels.rope import RopeTable


def attend_reference(
    query: Tensor,
    kv_cache: Tensor,
    table: Tensor,
    kpos: Tensor,
    turns: Tensor,
    qpos: Tensor,
    rope: RopeTable,
    scale: float,
) -> Tensor:
    """Attention of one request's queries [n, num_heads, head_size], as float64.

    `table` [blocks] names its blocks; `kpos` and `turns` [slots] describe its slots, `qpos` [n] its
    queries. Keys are rotated by their turns; a key is visible iff kpos <= qpos. All tensors are on
    one device. A query that sees nothing gets zeros.
    """
    real = torch.nonzero(kpos != GAP).flatten()
    slots = flat_slots(table, real)
    key_cache, value_cache = key_value(kv_cache)
    block, offset = slots // kv_cache.shape[2], slots % kv_cache.shape[2]
    key = rotate(key_cache[block, offset].double(), turns[real], rope)
    value = value_cache[block, offset].double()
    visible = kpos[real] <= qpos.unsqueeze(1)
    return _attend(query.double(), key, value, visible, scale)


def rotate(key: Tensor, turns: Tensor, rope: RopeTable) -> Tensor:
    """Keys [n, heads, size] in float64, rotated by their signed turns [n]."""
    half = rope.rotary_dim // 2
    rows = rope.cos_sin_cache[turns.abs().long()].double().unsqueeze(1)
    cos, sin = rows[..., :half], rows[..., half:] * turns.sign().view(-1, 1, 1)
    x, y, rest = key.tensor_split((half, 2 * half), dim=-1)
    return torch.cat([x * cos - y * sin, y * cos + x * sin, rest], dim=-1)


def _attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float) -> Tensor:
    tokens, heads, size = query.shape
    grouped = query.view(tokens, key.shape[1], -1, size)
    scores = torch.einsum("tkgd,skd->tkgs", grouped, key) * scale
    scores = scores.masked_fill(~visible[:, None, None, :], float("-inf"))
    weight = scores.softmax(-1).nan_to_num(0.0)
    return torch.einsum("tkgs,skd->tkgd", weight, value).reshape(tokens, heads, size)
