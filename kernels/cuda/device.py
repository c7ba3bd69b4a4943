"""What the GPU runs, how it multiplies, and copies to it."""

from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray
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


def write_rows(targets: Sequence[Tensor], rows: Mapping[int, Sequence[NDArray[np.int32]]]) -> None:
    """Write rows[i][n] to the front of row i of each target n, a two-dimensional tensor of int32.

    Each row of a target is written as far as the longest of them, with zeros after what it has. One
    asynchronous copy brings all to the device: the host waits for nothing, and takes pinned memory
    once, which costs most where there is none to be used again.
    """
    widths = [max(len(own[n]) for own in rows.values()) for n in range(len(targets))]
    shapes = [(len(rows),), *((len(rows), width) for width in widths)]
    staging = StagedUpload(shapes, targets[0].device)
    index, *arrays = staging.arrays
    index[:] = list(rows)
    for array, parts in zip(arrays, zip(*rows.values(), strict=True), strict=True):
        for row, part in zip(array, parts, strict=True):
            row[: len(part)] = part
            row[len(part) :] = 0
    at, *sent = staging.send()
    at = at.long()
    for target, width, values in zip(targets, widths, sent, strict=True):
        target[:, :width].index_copy_(0, at, values)


class StagedUpload:
    """Arrays of int32 that one copy brings to the device, each from a multiple of 16 bytes on.

    `arrays` have to be filled before `send`; filling them in place saves a copy of each.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], device: torch.device) -> None:
        sizes = [prod(shape) for shape in shapes]
        self._shapes, self._sizes, self._device = shapes, sizes, device
        begins = np.cumsum([0, *(-(-size // 4) * 4 for size in sizes)]).tolist()
        self._begins, pinned = begins, device.type == "cuda"
        self._host = torch.empty(begins[-1], dtype=torch.int32, pin_memory=pinned)
        self.arrays: list[NDArray[np.int32]] = [
            one.reshape(shape)
            for one, shape in zip(self._parts(self._host.numpy()), shapes, strict=True)
        ]

    def send(self) -> list[Tensor]:
        """The arrays on the device."""
        there = self._host.to(self._device, non_blocking=True)
        return [
            part.view(shape) for part, shape in zip(self._parts(there), self._shapes, strict=True)
        ]

    def _parts(self, joint: Any) -> list[Any]:
        pairs = zip(self._begins, self._sizes, strict=False)
        return [joint[begin : begin + size] for begin, size in pairs]


def upload_all(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Arrays of int32 on the device, by one copy."""
    staging = StagedUpload([array.shape for array in arrays], device)
    for place, array in zip(staging.arrays, arrays, strict=True):
        place[...] = array
    return staging.send()
