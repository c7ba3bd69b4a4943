"""Scratch memory that attention reuses from call to call."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor


class Workspace:
    """One growing buffer, overwritten by every use.

    It holds the gathered and rotated KV of one request in one layer while that layer runs. One
    engine needs one; it must not be shared between threads.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._buffer.numel()

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor in the buffer; it is valid until the next call."""
        size = prod(shape) * dtype.itemsize
        if size > self.nbytes:
            self._buffer = torch.empty(size, dtype=torch.uint8)
        return self._buffer[:size].view(dtype).view(tuple(shape))
