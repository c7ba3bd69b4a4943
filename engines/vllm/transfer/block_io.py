"""Blocks of the KV pool as bytes, and back."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class BlockStore:
    """The pool's tensors, one a layer, with blocks in their first dimension.

    A chunk of n blocks is n times `layers * block` bytes, layer by layer, block by block, each in
    the pool's own layout and type.
    """

    def __init__(self, layers: Sequence[Tensor]) -> None:
        self._layers = list(layers)
        first = self._layers[0]
        self._shape = first.shape[1:]
        self._block = first[0].numel() * first.element_size()

    def nbytes(self, blocks: int) -> int:
        """Bytes of a chunk of so many blocks."""
        return len(self._layers) * blocks * self._block

    def read(self, blocks: Sequence[int]) -> memoryview:
        """A copy of some blocks in all layers."""
        ids = torch.tensor(blocks, device=self._layers[0].device)
        value = torch.stack([layer[ids] for layer in self._layers]).cpu()
        return value.view(-1).view(torch.uint8).numpy().data

    def write(
        self, value: memoryview, size: int, pages: Sequence[int], blocks: Sequence[int]
    ) -> None:
        """Write `pages` of a chunk of `size` blocks into `blocks` of the pool."""
        every = np.frombuffer(value, dtype=np.uint8).reshape(len(self._layers), size, self._block)
        # Values belong to their tier and are read-only: picking pages makes the copy that is ours.
        picked = torch.from_numpy(every[:, list(pages)]).view(self._layers[0].dtype)
        ids = torch.tensor(blocks, device=self._layers[0].device)
        for layer, part in zip(self._layers, picked, strict=True):
            layer[ids] = part.view(-1, *self._shape).to(layer.device)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """CopyCommand blocks within the pool, from the first to the second of each pair."""
        if not pairs:
            return
        sources, targets = torch.tensor(pairs, device=self._layers[0].device).T
        for layer in self._layers:
            layer[targets] = layer[sources]
