"""What `walk_kernel` must compute, part by part, in float64 and plain torch, on any device."""

import torch
from torch import Tensor

from picbench.kernels.cuda.layout import key_value
from picbench.kernels.cuda.merge import merge_reference
from picbench.kernels.cuda.prefill.paged.paged_prefill import Walk
from picbench.kernels.cuda.prefill.tiled import tokens_of
from picbench.kernels.cuda.reference import rotate
from picbench.kernels.paging import BLOCK_SIZE


def walk_reference(query: Tensor, kv_cache: Tensor, walk: Walk, scale: float) -> Tensor:
    """Attention of `query` [queries, num_heads, head_size], float64, by the same visits.

    Only visits that need a mask get one, and only the first keys of the others count.
    """
    heads, size = query.shape[1:]
    partial = query.new_zeros(len(query), walk.parts, heads, size, dtype=torch.float64)
    lse = partial.new_full((len(query), walk.parts, heads), float("-inf"))
    half = tokens_of(walk.shape.group) // 2
    for first, queries, begin, masked, common, visits, part in walk.work.tolist():
        for i in range(queries):
            mine = range(begin, begin + (common if i < half else visits))
            sums, logs = _attend(query[first + i], kv_cache, walk, first + i, mine, masked, scale)
            partial[first + i, part], lse[first + i, part] = sums, logs
    joint = [merge_reference(sums, logs) for sums, logs in zip(partial, lse, strict=True)]
    return torch.stack(joint)


def _attend(
    query: Tensor,
    kv_cache: Tensor,
    walk: Walk,
    index: int,
    visits: range,
    masked: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output [heads, size] and log-sum-exps [heads] of one query over some visits."""
    scores, values = [], []
    for number, visit in enumerate(visits):
        tile = int(walk.visits[visit])
        slots = walk.slots[tile].long()
        key, value = (half[slots // BLOCK_SIZE, slots % BLOCK_SIZE] for half in key_value(kv_cache))
        back = rotate(query.double()[None], -walk.turns[tile : tile + 1], walk.rope)[0]
        grouped = back.view(key.shape[1], -1, key.shape[2])
        found = torch.einsum("kgd,skd->kgs", grouped, key.double()) * scale
        seen = walk.kpos[tile] <= walk.qpos[index]
        if number >= masked:
            seen = torch.arange(len(slots), device=slots.device) < walk.shown[tile]
        scores.append(found.flatten(0, 1).masked_fill(~seen, float("-inf")))
        values.append(torch.where((slots >= 0)[:, None, None], value.double(), 0.0))
    if not scores:
        return query.double() * 0, query.new_full(query.shape[:1], float("-inf")).double()
    joint, value = torch.cat(scores, 1), torch.cat(values)
    weight = joint.softmax(1).nan_to_num(0.0).view(value.shape[1], -1, len(value))
    return torch.einsum("kgs,skd->kgd", weight, value).flatten(0, 1), joint.logsumexp(1)
