"""What kernels of link and prefill must compute, step by step, in plain torch on any device."""

import torch
from torch import Tensor

from picbench.kernels.cuda.layout import key_value
from picbench.kernels.cuda.prefill.paged.paged_prefill import PagedPrefill
from picbench.kernels.cuda.prefill.query_tile import tokens_of
from picbench.kernels.float64_attention import rotate_reference
from picbench.kernels.paging import BLOCK_SIZE
from picbench.kernels.rope import RopeTable, rotate


def gather_reference(
    kv_cache: Tensor, slots: Tensor, rope_shift: Tensor, rope: RopeTable
) -> tuple[Tensor, Tensor]:
    """`gather` in plain torch: keys and values [n, kv_heads, head_size] of slots >= 0."""
    key_cache, value_cache = key_value(kv_cache)
    block, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    rows = rope.shift_rows(rope_shift)
    key = rotate(key_cache[block, offset], rows, is_neox=rope.is_neox)
    return key, value_cache[block, offset]


def merge_reference(partial: Tensor, lse: Tensor) -> Tensor:
    """The output [heads, head_size] of all splits.

    `partial` [splits, heads, head_size] and `lse` [splits, heads] are those of each. A split whose
    log-sum-exp is -inf saw nothing and may hold anything; if all did, the output is 0.
    """
    peak = lse.max(0).values.nan_to_num(neginf=0.0)
    weight = (lse - peak).exp().unsqueeze(-1)
    total = weight.sum(0)
    joint = torch.where(weight > 0, partial * weight, 0).sum(0)
    return joint / total.where(total > 0, 1)


def paged_reference(query: Tensor, kv_cache: Tensor, step: PagedPrefill, scale: float) -> Tensor:
    """Attention of `query` [queries, num_heads, head_size], float64, by the same schedule.

    Only key tiles that need a mask are masked by position; of the others the first `shown` count.
    """
    heads, size = query.shape[1:]
    partial = query.new_zeros(len(query), step.splits, heads, size, dtype=torch.float64)
    lse = partial.new_full((len(query), step.splits, heads), float("-inf"))
    half = tokens_of(step.shape.group) // 2
    for first, queries, begin, masked, common, count, split in step.work.tolist():
        for i in range(queries):
            own = range(begin, begin + (common if i < half else count))
            found = _attend(query[first + i], kv_cache, step, first + i, own, masked, scale)
            partial[first + i, split], lse[first + i, split] = found
    joint = [merge_reference(outputs, logs) for outputs, logs in zip(partial, lse, strict=True)]
    return torch.stack(joint)


def _attend(
    query: Tensor,
    kv_cache: Tensor,
    step: PagedPrefill,
    index: int,
    scheduled: range,
    masked: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output [heads, size] and log-sum-exps [heads] of one query over some key tiles."""
    scores, values = [], []
    for number, place in enumerate(scheduled):
        tile = int(step.key_tiles[place])
        slots = step.slots[tile].long()
        key, value = (half[slots // BLOCK_SIZE, slots % BLOCK_SIZE] for half in key_value(kv_cache))
        shift = step.rope_shift[tile : tile + 1]
        rotated = rotate_reference(query.double()[None], -shift, step.rope)
        grouped = rotated.view(key.shape[1], -1, key.shape[2])
        found = torch.einsum("kgd,skd->kgs", grouped, key.double()) * scale
        seen = step.kpos[tile] <= step.qpos[index]
        if number >= masked:
            seen = torch.arange(len(slots), device=slots.device) < step.shown[tile]
        scores.append(found.flatten(0, 1).masked_fill(~seen, float("-inf")))
        values.append(torch.where((slots >= 0)[:, None, None], value.double(), 0.0))
    if not scores:
        return query.double() * 0, query.new_full(query.shape[:1], float("-inf")).double()
    joint, value = torch.cat(scores, 1), torch.cat(values)
    weight = joint.softmax(1).nan_to_num(0.0).view(value.shape[1], -1, len(value))
    return torch.einsum("kgs,skd->kgd", weight, value).flatten(0, 1), joint.logsumexp(1)
