"""What this GPU and this installation can serve."""

import torch

from picbench.errors import ConfigError
from picbench.kernels.cuda.decode import attention as decode
from picbench.kernels.cuda.decode.request_table import RequestTable
from picbench.kernels.cuda.decode.shared import shared_decode
from picbench.kernels.cuda.decode.shared.shared_table import SharedRequestTable
from picbench.kernels.cuda.prefill import flash
from picbench.kernels.cuda.prefill.paged import paged_prefill
from picbench.kernels.rope import RopeTable
from picbench.kernels.shape import HeadShape

# Triton's tiles are powers of two, and a head is a side of them.
_HEAD_SIZES = (16, 32, 64, 128, 256)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def require(shape: HeadShape) -> None:
    """Raises ConfigError where no kernel here serves these heads."""
    if shape.head_size not in _HEAD_SIZES:
        raise ConfigError(
            f"heads of size {shape.head_size} are not supported on CUDA",
            hint=f"picbench's CUDA kernels serve head sizes {', '.join(map(str, _HEAD_SIZES))}",
        )
    if shape.dtype not in _DTYPES:
        raise ConfigError(
            f"a KV cache of {shape.dtype} is not supported on CUDA",
            hint="use `dtype=bfloat16`, float16 or float32",
        )


def describe(shape: HeadShape, rope: RopeTable, table: RequestTable) -> str:
    """One line that says which kernels serve these heads here."""
    one = "Gluon" if decode.covers(shape, rope, table) else "Triton"
    few = (
        "paged prefill in place, or "
        if paged_prefill.covers(shape, rope) and not table.unrotated
        else ""
    )
    if flash.covers(shape):
        many = "gather and FlashAttention-3"
    else:
        many = "gather and Triton tiles (FlashAttention-3 not usable)"
    together = ""
    if isinstance(table, SharedRequestTable):
        kind = "Gluon" if shared_decode.covers(shape, rope, table) else "Triton"
        together = f"{kind} groups beside "
    return f"decode: {together}{one} split-KV; link: {few}{many}"
