"""A launch that differs from an earlier one in pointers only needs no look-up by Triton."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from picbench.kernels.cuda.repeated_launch import RepeatedLaunch

GRID = (4, 2, 1)


class FakeKernel:
    """Notes what Triton is asked for, and what is launched without asking it."""

    arg_names = ("x", "y", "count", "scale", "SIZE", "WIDE")

    def __init__(self) -> None:
        self.looked_up: list[Any] = []
        self.launched: list[Any] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> "FakeCompiled":
            self.looked_up.append((grid, arguments, options))
            return FakeCompiled(self.launched, len(self.looked_up))

        return run


class FakeCompiled:
    def __init__(self, launched: list[Any], number: int) -> None:
        self._launched, self._number = launched, number

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments: self._launched.append((self._number, grid, arguments))


def floats(offset: int = 0) -> torch.Tensor:
    return torch.zeros(64 + offset)[offset:]


def options(**changed: Any) -> dict[str, Any]:
    return {"num_warps": 4, "WIDE": True, "SIZE": 64} | changed


def test_the_second_launch_goes_to_what_the_first_one_found() -> None:
    kernel = FakeKernel()
    launch = RepeatedLaunch(kernel)
    first, second = (floats(), floats(), 3, 0.5), (floats(), floats(), 3, 0.5)
    launch(GRID, first, options())
    launch((9, 1, 1), second, options())
    assert kernel.looked_up == [(GRID, first, options())]
    [(number, grid, arguments)] = kernel.launched
    assert (number, grid) == (1, (9, 1, 1))
    assert arguments[0] is second[0] and arguments[1] is second[1]
    # Compile-time parameters by the kernel's order, without Triton's own.
    assert arguments[2:] == (3, 0.5, 64, True)


@pytest.mark.parametrize(
    ("arguments", "changed"),
    [
        ((floats(1), floats(), 3, 0.5), {}),
        ((floats().half(), floats(), 3, 0.5), {}),
        ((floats(), floats(), 4, 0.5), {}),
        ((floats(), floats(), 3, 0.25), {}),
        ((floats(), floats(), 3, 0.5), {"SIZE": 32}),
        ((floats(), floats(), 3, 0.5), {"num_warps": 8}),
    ],
    ids=["alignment", "type", "integer", "float", "parameter", "warps"],
)
def test_other_kinds_of_arguments_are_looked_up(
    arguments: tuple[Any, ...], changed: dict[str, Any]
) -> None:
    kernel = FakeKernel()
    launch = RepeatedLaunch(kernel)
    usual = (floats(), floats(), 3, 0.5)
    launch(GRID, usual, options())
    launch(GRID, arguments, options(**changed))
    launch(GRID, usual, options())
    launch(GRID, arguments, options(**changed))
    assert len(kernel.looked_up) == 2
    assert [number for number, *_ in kernel.launched] == [1, 2]


def test_interpreted_kernels_are_always_looked_up() -> None:
    calls: list[Any] = []

    class Interpreted:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *arguments, **options: calls.append(arguments)

    launch = RepeatedLaunch(Interpreted())
    for _ in range(2):
        launch(GRID, (floats(),), {})
    assert len(calls) == 2
