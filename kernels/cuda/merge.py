"""Merges attention outputs of splits, disjoint sets of keys, by their log-sum-exps (Triton).

`merge_groups` merges with them those of groups that several requests are in (`decode.shared`).
"""

import triton
import triton.language as tl
from torch import Tensor

from picbench.kernels.cuda.repeated_launch import RepeatedLaunch


def merge_splits(
    launch: RepeatedLaunch, partial: Tensor, lse: Tensor, counts: Tensor, out: Tensor, splits: int
) -> None:
    """Merges up to `splits` splits of each request into `out` [requests, heads, head_size].

    Request r owns rows [r * splits, (r + 1) * splits) of `partial` [rows, heads, head_size] and
    `lse` [rows, heads], float32. Those splits are filled that got any of its counts[r] key tiles;
    `counts` [requests] is int32, `launch` that of `merge`. A request with a count of 0 is not
    written, one with a negative count has no keys and gets zeros.
    """
    requests, heads, size = out.shape
    strides = (heads * size, heads, 1, out.stride(0), out.stride(1))
    launch(
        (requests, heads, 1),
        (partial, lse, counts, counts, out, *strides, splits),
        {"HEAD": size, "TILE": 8, "num_warps": 1},
    )


@triton.jit
def fold(
    logs: tl.tensor,
    outputs: tl.tensor,
    lse_max: tl.tensor,
    weight_sum: tl.tensor,
    acc: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Adds partial outputs [n, HEAD] by their log-sum-exps [n]; -inf means nothing was seen.

    What saw nothing gets weight 0, even if NaN.
    """
    peak = tl.maximum(lse_max, tl.max(logs, 0))
    safe = tl.where(peak == float("-inf"), 0.0, peak)
    weight = tl.exp(logs - safe)
    outputs = tl.where(weight[:, None] > 0.0, outputs, 0.0)
    rescale = tl.exp(lse_max - safe)
    weight_sum = weight_sum * rescale + tl.sum(weight, 0)
    return peak, weight_sum, acc * rescale + tl.sum(outputs * weight[:, None], 0)


@triton.jit(do_not_specialize=["lse_row_stride", "splits"])
def merge(
    partial: tl.tensor,
    lse: tl.tensor,
    starts: tl.tensor,
    counts: tl.tensor,
    out: tl.tensor,
    row_stride: tl.tensor,
    lse_row_stride: tl.tensor,
    lse_head_stride: tl.tensor,
    out_stride: tl.tensor,
    out_head: tl.tensor,
    splits: tl.tensor,
    HEAD: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Writes out[request, head], the output of all splits of the request; grid (requests, heads).

    With `splits`, request r owns rows [r * splits, (r + 1) * splits) of `partial` and `lse`, of
    which those that got any of its counts[r] tiles are filled; else counts[r] rows from starts[r]
    on. A request with a count of 0 is not written, one with a negative count gets zeros. `partial`
    [rows, heads, HEAD] may be of any floating type, `lse` [rows, heads] is float32 and strided.
    """
    request = tl.program_id(0)
    head = tl.program_id(1)
    count = tl.load(counts + request)
    if count == 0:
        return
    start = request * splits
    if splits > 0:
        # Without tiles there is no split, and no length of one to divide by.
        count = tl.cdiv(count, tl.maximum(tl.cdiv(count, splits), 1))
    else:
        start = tl.load(starts + request)
    dim = tl.arange(0, HEAD)
    lane = tl.arange(0, TILE)
    lse_max = float("-inf")
    weight_sum = 0.0
    acc = tl.zeros([HEAD], tl.float32)
    for first in range(0, count, TILE):
        filled = first + lane < count
        row = (start + first + lane).to(tl.int64)
        logs = tl.load(
            lse + row * lse_row_stride + head * lse_head_stride,
            mask=filled,
            other=float("-inf"),
        )
        at = partial + row[:, None] * row_stride + head * HEAD + dim[None, :]
        outputs = tl.load(at, mask=filled[:, None], other=0.0).to(tl.float32)
        lse_max, weight_sum, acc = fold(logs, outputs, lse_max, weight_sum, acc)
    result = acc / tl.where(weight_sum > 0.0, weight_sum, 1.0)
    tl.store(
        out + request.to(tl.int64) * out_stride + head * out_head + dim,
        result.to(out.dtype.element_ty),
    )


@triton.jit(do_not_specialize=["splits"])
def merge_groups(
    partial: tl.tensor,
    lse: tl.tensor,
    tiles: tl.tensor,
    lengths: tl.tensor,
    rows: tl.tensor,
    cells: tl.tensor,
    part_of: tl.tensor,
    control: tl.tensor,
    counter: tl.tensor,
    parts: tl.tensor,
    part_lse: tl.tensor,
    out: tl.tensor,
    part_stride: tl.tensor,
    out_stride: tl.tensor,
    out_head: tl.tensor,
    splits: tl.tensor,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Writes out[request, head]; grid (requests, HEADS). Resets the counter of `attend_groups`.

    Request r owns rows [r * splits, (r + 1) * splits) of `partial` [rows, HEADS, HEAD] and `lse`
    [rows, HEADS], of which those are filled that got any of its tiles[r] tiles, and the rows of
    `parts` [parts, HEADS, HEAD] and `part_lse` that part_of[rows[r], : cells[rows[r]]] names, if
    control[0] is not 0. A request of length 0 is not written, one of a negative length gets zeros.
    """
    request = tl.program_id(0)
    head = tl.program_id(1)
    if request + head == 0:
        tl.store(counter, 0)
    length = tl.load(lengths + request)
    if length == 0:
        return
    row = tl.load(rows + request).to(tl.int64)
    count = tl.maximum(tl.load(tiles + request), 0)
    # Without tiles there is no split, and no length of one to divide by.
    count = tl.cdiv(count, tl.maximum(tl.cdiv(count, splits), 1))
    others = tl.where((length > 0) & (tl.load(control) > 0), tl.load(cells + row), 0)
    dim = tl.arange(0, HEAD)
    lane = tl.arange(0, TILE)
    lse_max = float("-inf")
    weight_sum = 0.0
    acc = tl.zeros([HEAD], tl.float32)
    for first in range(0, others, TILE):
        at = part_of + row * part_stride + first + lane
        part = tl.load(at, mask=first + lane < others, other=-1)
        filled = part >= 0
        to = part.to(tl.int64) * HEADS + head
        logs = tl.load(part_lse + to, mask=filled, other=float("-inf"))
        source = parts + (to * HEAD)[:, None] + dim[None, :]
        outputs = tl.load(source, mask=filled[:, None], other=0.0).to(tl.float32)
        lse_max, weight_sum, acc = fold(logs, outputs, lse_max, weight_sum, acc)
    for first in range(0, count, TILE):
        filled = first + lane < count
        to = (request * splits + first + lane).to(tl.int64) * HEADS + head
        logs = tl.load(lse + to, mask=filled, other=float("-inf"))
        source = partial + (to * HEAD)[:, None] + dim[None, :]
        outputs = tl.load(source, mask=filled[:, None], other=0.0)
        lse_max, weight_sum, acc = fold(logs, outputs, lse_max, weight_sum, acc)
    result = acc / tl.where(weight_sum > 0.0, weight_sum, 1.0)
    tl.store(
        out + request.to(tl.int64) * out_stride + head * out_head + dim,
        result.to(out.dtype.element_ty),
    )
