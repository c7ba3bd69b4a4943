"""Elementary functions that are right from their first call on.

Torch computes them on a CPU with oneMKL, which chooses a function's kernel when it is first called.
If several threads do so at once, one of them may get a kernel of half the precision for its part of
that one call (pytorch/pytorch#188792). The table of RoPE is made by such a call: one start of an
engine on an Intel Xeon had rotations in it that were off by 0.00015, other starts had not.
"""

import torch

#: Those of models and of their checks that torch hands to oneMKL (aten/src/ATen/cpu/vml.h).
_FUNCTIONS = (
    torch.cos,
    torch.sin,
    torch.exp,
    torch.expm1,
    torch.log,
    torch.log1p,
    torch.sqrt,
    torch.tanh,
    torch.erf,
)


def settle_first_calls() -> None:
    """Call each function once in this thread alone, so that all later calls have its own kernel."""
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype, device="cpu")
        for function in _FUNCTIONS:
            function(one)
