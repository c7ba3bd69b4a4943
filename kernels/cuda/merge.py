"""Joins partial outputs of attention over disjoint sets of keys by their log-sum-exps."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def merge_reference(partial: Tensor, lse: Tensor) -> Tensor:
    """The joint output [heads, head_size] of parts [parts, heads, head_size], [parts, heads].

    A part whose log-sum-exp is -inf saw nothing and may hold anything; if all are, the output is 0.
    """
    peak = lse.max(0).values.nan_to_num(neginf=0.0)
    weight = (lse - peak).exp().unsqueeze(-1)
    total = weight.sum(0)
    joint = torch.where(weight > 0, partial * weight, 0).sum(0)
    return joint / total.where(total > 0, 1)


def merge_parts(partial: Tensor, lse: Tensor, counts: Tensor, out: Tensor, parts: int) -> None:
    """Joins up to `parts` parts of each request's output into `out` [requests, heads, head_size].

    Request r owns parts [r * parts, (r + 1) * parts) of `partial` [parts, heads, head_size] and
    `lse` [parts, heads], of which those are filled that got any of its counts[r] pieces of work.
    """
    requests, heads, size = out.shape
    merge[(requests, heads)](
        partial,
        lse,
        counts,
        counts,
        out,
        heads * size,
        heads,
        1,
        out.stride(0),
        out.stride(1),
        parts,
        HEAD=size,
        TILE=8,
        num_warps=1,
    )


@triton.jit(do_not_specialize=["splits"])
def merge(
    partial: tl.tensor,
    lse: tl.tensor,
    starts: tl.tensor,
    counts: tl.tensor,
    out: tl.tensor,
    part_stride: tl.tensor,
    lse_part_stride: tl.tensor,
    lse_head_stride: tl.tensor,
    out_stride: tl.tensor,
    out_head: tl.tensor,
    splits: tl.tensor,
    HEAD: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Writes out[request, head] = the joint output of the request's parts.

    Grid (requests, heads). With `splits`, request r owns parts [r * splits, (r + 1) * splits),
    of which those that got any of its counts[r] tiles are filled; else counts[r] parts from
    starts[r] on. A request that counts nothing is left alone. `partial` [parts, heads, HEAD] may
    be of any floating type, `lse` is float32 and strided.
    """
    request = tl.program_id(0)
    head = tl.program_id(1)
    count = tl.load(counts + request)
    if count == 0:
        return
    start = request * splits
    if splits > 0:
        count = tl.cdiv(count, tl.cdiv(count, splits))
    else:
        start = tl.load(starts + request)
    dim = tl.arange(0, HEAD)
    lane = tl.arange(0, TILE)
    highest = float("-inf")
    total = 0.0
    joint = tl.zeros([HEAD], tl.float32)
    for first in range(0, count, TILE):
        filled = first + lane < count
        part = (start + first + lane).to(tl.int64)
        logs = tl.load(
            lse + part * lse_part_stride + head * lse_head_stride,
            mask=filled,
            other=float("-inf"),
        )
        at = partial + part[:, None] * part_stride + head * HEAD + dim[None, :]
        parts = tl.load(at, mask=filled[:, None], other=0.0).to(tl.float32)
        peak = tl.maximum(highest, tl.max(logs, 0))
        safe = tl.where(peak == float("-inf"), 0.0, peak)
        # Neither load waits for the other; what saw nothing weighs nothing, whatever it holds.
        weight = tl.exp(logs - safe)
        parts = tl.where(weight[:, None] > 0.0, parts, 0.0)
        fade = tl.exp(highest - safe)
        total = total * fade + tl.sum(weight, 0)
        joint = joint * fade + tl.sum(parts * weight[:, None], 0)
        highest = peak
    result = joint / tl.where(total > 0.0, total, 1.0)
    tl.store(
        out + request.to(tl.int64) * out_stride + head * out_head + dim,
        result.to(out.dtype.element_ty),
    )
