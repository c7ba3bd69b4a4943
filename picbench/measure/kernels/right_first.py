"""Outputs of kernels are right before the kernels are timed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from picbench.errors import InvalidRun
from picbench.measure.kernels.scene import Scene, relative_error

#: Relative error against float64 that a type may have.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def require_right(what: str, errors: Sequence[float], dtype: torch.dtype) -> float:
    """The largest of some relative errors. Raises InvalidRun where it is too large, or NaN."""
    # A maximum of Python's would pass over NaN.
    error = float(torch.tensor(errors).max())
    if not error <= TOLERANCE[dtype]:
        shown = ", ".join(f"{one:.2e}" for one in errors)
        raise InvalidRun(
            f"{what}: relative error {shown}",
            hint="nothing was timed; run the tests of picbench.kernels on this device",
        )
    return error


def decode_errors(scene: Scene, query: Tensor, out: Tensor) -> list[float]:
    """Relative errors of what the first, a middle and the last request got from decode."""
    errors = []
    for index in sorted({0, len(query) // 2, len(query) - 1}):
        own = slice(index, index + 1)
        end = torch.tensor([scene.requests[index].end], dtype=torch.int32)
        errors.append(relative_error(out[own], scene.expected(index, query[own], end)))
    return errors
