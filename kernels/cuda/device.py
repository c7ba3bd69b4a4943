"""What the GPU runs, how it multiplies, and copies to it."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
import triton
from torch import Tensor

from picbench.kernels.rope import RopeTable
from picbench.kernels.shape import HeadShape

#: Versions of Triton whose Gluon the kernels are written for: they compile with 3.6.0, 3.7.1, 3.8.0
#: and 3.9.0, and were run and measured with 3.6.0.
TRITON = ((3, 6), (3, 9))

_HOPPER = (9, 0)
# An H200's, where there is no GPU.
_ASSUMED = 132


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of this device."""
    if device.type != "cuda":
        return _ASSUMED
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def runs_gluon() -> bool:
    """Whether this GPU and this Triton run the kernels written in Gluon."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != _HOPPER:
        return False
    major, minor = triton.__version__.split(".")[:2]
    return TRITON[0] <= (int(major), int(minor)) <= TRITON[1]


def gluon_serves(shape: HeadShape, rope: RopeTable) -> bool:
    """Whether kernels written in Gluon serve such heads here."""
    half = shape.dtype in (torch.float16, torch.bfloat16)
    whole = rope.rotary_dim == shape.head_size and shape.head_size in (64, 128)
    return half and whole and rope.is_neox and runs_gluon()


def precision(dtype: torch.dtype) -> str:
    """Triton's `input_precision` for this type: float32 exactly, not as TF32."""
    return "ieee" if dtype == torch.float32 else "tf32"


def upload(values: np.ndarray, device: torch.device) -> Tensor:
    """The values on the device, by an asynchronous copy."""
    host = torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def overwrite(target: Tensor, values: np.ndarray) -> None:
    """Write values over a contiguous tensor on the device, by one asynchronous copy.

    The copy is in the order of the stream. What it reads is not used again before it has ended:
    PyTorch's allocator of pinned memory waits for that, and the host does not.
    """
    host = torch.empty(target.shape, dtype=target.dtype, pin_memory=target.is_cuda)
    host.numpy()[...] = values
    target.copy_(host, non_blocking=True)


def upload_all(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Arrays of int32 on the device, by one copy; each begins at a multiple of 16 bytes."""
    padded = [-(-array.size // 4) * 4 for array in arrays]
    host = torch.empty(sum(padded), dtype=torch.int32, pin_memory=device.type == "cuda")
    values, begins = host.numpy(), np.cumsum([0, *padded]).tolist()
    for array, begin in zip(arrays, begins, strict=False):
        values[begin : begin + array.size] = array.ravel()
    there = host.to(device, non_blocking=True)
    return [
        there[begin : begin + array.size].view(array.shape)
        for array, begin in zip(arrays, begins, strict=False)
    ]
