"""Bounded scratch memory on the device."""

from math import prod

import torch
from torch import Tensor

from picbench.errors import ConfigError


class CudaWorkspace:
    """One buffer of a fixed size: a layer's rotated keys and values of link, or partial outputs.

    Its contents are valid during one call. One engine needs one, shared by all layers.
    """

    def __init__(self, max_bytes: int, device: torch.device | str) -> None:
        self._buffer = torch.empty(max_bytes, dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        """Device memory held."""
        return self._buffer.numel()

    def pages(self, pages: int, page: int, heads: int, size: int, dtype: torch.dtype) -> Tensor:
        """Two tensors of pages as one: [2, pages, page, heads, size], not initialised."""
        shape = (2, pages, page, heads, size)
        wanted = 2 * pages * page * heads * size * dtype.itemsize
        if wanted > self.nbytes:
            raise ConfigError(
                f"{pages * page} tokens of {heads} KV heads need a workspace of {wanted} bytes, "
                f"not {self.nbytes}",
                hint="raise the workspace's size or lower max_model_len",
            )
        return self._buffer[:wanted].view(dtype).view(shape)

    def floats(self, *shapes: tuple[int, ...]) -> list[Tensor]:
        """Tensors of these shapes, float32, not initialised, one after the other."""
        sizes = [prod(shape) for shape in shapes]
        if 4 * sum(sizes) > self.nbytes:
            raise ConfigError(
                f"partial outputs need a workspace of {4 * sum(sizes)} bytes, not {self.nbytes}",
                hint="raise the workspace's size",
            )
        flat = self._buffer[: 4 * sum(sizes)].view(torch.float32)
        split = torch.split(flat, sizes)
        return [some.view(shape) for some, shape in zip(split, shapes, strict=True)]

    def heads(self, tokens: int, kv_heads: int, size: int, dtype: torch.dtype) -> int:
        """The most KV heads that fit at once for this many tokens: a divisor of `kv_heads`."""
        fitting = self.nbytes // max(1, 2 * tokens * size * dtype.itemsize)
        return max(
            (n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and n <= fitting), default=1
        )
