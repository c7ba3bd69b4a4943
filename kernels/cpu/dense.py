"""Attention of one request in plain torch, for shapes that vLLM's kernels do not cover."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from picbench.kernels.cpu.gather import Gather
from picbench.kernels.cpu.scratch import read_slots

# Queries of one call: enough to fill the cores, few enough that most of the invisible keys are
# skipped.
_QUERY_TILE = 256


def attend_dense(
    query: Tensor, kv_cache: Tensor, gather: Gather, scale: float, out: Tensor
) -> None:
    """Attention of the request's queries over its gathered slots, into `out`.

    `gather` must hold single slots only. Shapes are those of `attend`.
    """
    key, value = read_slots(kv_cache, gather.slots, gather.rows, is_neox=gather.is_neox)
    for start in range(gather.start, gather.stop, _QUERY_TILE):
        stop = min(start + _QUERY_TILE, gather.stop)
        visible = gather.visible[start - gather.start : stop - gather.start]
        out[start:stop] = _attend_tile(query[start:stop], key, value, visible, scale)


def _attend_tile(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float
) -> Tensor:
    most = int(visible.max())
    if most == 0:
        return torch.zeros_like(query)
    # A query that sees nothing would get NaN: it is shown one key, and its output zeroed.
    mask = torch.arange(most) < visible.clamp(min=1).unsqueeze(1)
    result = F.scaled_dot_product_attention(
        _heads_first(query),
        _heads_first(key[:most]),
        _heads_first(value[:most]),
        attn_mask=mask,
        scale=scale,
        enable_gqa=True,
    )
    return result.squeeze(0).transpose(0, 1) * (visible > 0).view(-1, 1, 1)


def _heads_first(packed: Tensor) -> Tensor:
    return packed.transpose(0, 1).unsqueeze(0)
