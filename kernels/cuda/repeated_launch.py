"""Launches of a kernel that differ in their pointers only: one a layer."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


class RepeatedLaunch:
    """A kernel that is launched again and again with arguments of the same kinds.

    For each launch Triton works out what it may assume of the arguments, such as pointers that are
    aligned, and looks the compiled kernel up by that. This takes the host longer than a GPU needs
    for a layer of a small step. A launch whose numbers are those of an earlier one, and whose
    tensors are of the same types and as well aligned, calls what was found for that one.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self, grid: tuple[int, int, int], arguments: tuple[Any, ...], options: Mapping[str, Any]
    ) -> None:
        """Launch the kernel over `grid`.

        `arguments` are the first ones of its signature. `options` are the others by name, all of
        them compile-time parameters, and Triton's own, such as ``num_warps``.
        """
        kinds = (*map(_kind, arguments), *options.values())
        compiled = self._compiled.get(kinds)
        if compiled is None:
            # None again where Triton interprets kernels.
            self._compiled[kinds] = self._kernel[grid](*arguments, **options)
        else:
            fixed = self._kernel.arg_names[len(arguments) :]
            compiled[grid](*arguments, *[options[name] for name in fixed])


def _kind(argument: Any) -> Any:
    """All that a kernel may be compiled for, and more: of a number its value."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    return argument
