"""Reading, writing and copying blocks of the KV pool."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class BlockStore:
    """The pool's tensors, one per layer, with blocks in their first dimension.

    The value of a chunk is [layers, blocks, bytes of a block], each block in the pool's own layout
    and dtype.
    """

    def __init__(self, layers: Sequence[Tensor]) -> None:
        self._layers = list(layers)
        first = self._layers[0]
        self._shape = first.shape[1:]
        self._block = first[0].numel() * first.element_size()

    def nbytes(self, blocks: int) -> int:
        """Bytes of a chunk of this many blocks."""
        return len(self._layers) * blocks * self._block

    def read(self, blocks: Sequence[int]) -> memoryview:
        """Copy some blocks, in all layers, to the host."""
        ids = torch.tensor(blocks, device=self._layers[0].device)
        value = torch.stack([layer[ids] for layer in self._layers]).cpu()
        return value.view(-1).view(torch.uint8).numpy().data

    def write(
        self, value: memoryview, size: int, pages: Sequence[int], blocks: Sequence[int]
    ) -> None:
        """Write `pages` of a chunk of `size` blocks into `blocks` of the pool."""
        pages_of = np.frombuffer(value, dtype=np.uint8).reshape(len(self._layers), size, -1)
        # Values belong to their tier and are read-only; indexing by pages copies them.
        picked = torch.from_numpy(pages_of[:, list(pages)]).view(self._layers[0].dtype)
        ids = torch.tensor(blocks, device=self._layers[0].device)
        for layer, data in zip(self._layers, picked, strict=True):
            layer[ids] = data.view(-1, *self._shape).to(layer.device)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks within the pool; each pair is (source, target)."""
        if not pairs:
            return
        sources, targets = torch.tensor(pairs, device=self._layers[0].device).T
        for layer in self._layers:
            layer[targets] = layer[sources]
