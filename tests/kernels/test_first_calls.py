"""What is called before many threads call it; the race itself needs a certain processor."""

import subprocess
import sys

import torch

from picbench.kernels import first_calls

#: A process of its own, as no function has been called in it: of threads, which call sine at once.
_PROGRAM = """
import torch
from picbench.kernels.first_calls import settle_first_calls
settle_first_calls()
torch.set_num_threads(4)
angles = torch.arange(2**18, dtype=torch.float32)
turns = torch.complex(angles.cos(), angles.sin()).abs()
print(float((turns - 1).abs().max()))
"""


def test_a_table_is_exact_in_a_new_process() -> None:
    found = subprocess.run(
        [sys.executable, "-c", _PROGRAM], check=True, capture_output=True, text=True
    )
    assert float(found.stdout) < 1e-6


def test_each_function_is_called_alone_in_both_types() -> None:
    called: list[tuple[str, torch.dtype, int]] = []

    class Noting(torch.overrides.TorchFunctionMode):
        """Notes each function that is called, and of what."""

        def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if args and isinstance(args[0], torch.Tensor):
                called.append((function.__name__, args[0].dtype, args[0].numel()))
            return function(*args, **(kwargs or {}))

    with Noting():
        first_calls.settle_first_calls()
    for name in ("cos", "sin", "exp", "sqrt"):
        assert (name, torch.float32, 1) in called
        assert (name, torch.float64, 1) in called
    assert {count for *_, count in called} == {1}
