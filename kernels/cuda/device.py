"""What the GPU is and runs."""

from functools import cache

import torch
import triton

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
    return half and whole and runs_gluon()
