"""The KV pool as rows: a row is a block's KV in all layers."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from picbench.errors import EngineError

#: Bytes that a copy within the pool takes besides, at a time.
_COPIED = 64 << 20

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class PoolRows:
    """The pool's tensors, one per layer, with blocks in their first dimension.

    A row is [layers, words]: the bytes of a block's pages as they are in the pool, whatever order
    of dimensions they have there. vLLM allocates all layers at once where it can
    (`layer_stride` in vllm/v1/kv_cache_interface.py): then rows are read and written by
    `one_kernel`, otherwise by one a layer. Nothing here waits for a GPU.

    Raises EngineError for a pool whose blocks are not dense.
    """

    def __init__(self, layers: Sequence[Tensor]) -> None:
        self.device = layers[0].device
        self._word = _word(layers)
        views = [_pages(layer, self._word) for layer in layers]
        joined = _joined(views)
        # Of each view [blocks, layers, words].
        self._views = [view[:, None] for view in views] if joined is None else [joined]
        self.one_kernel = joined is not None
        self.shape = (len(views), views[0].shape[1])
        self.row_bytes = len(views) * views[0].shape[1] * self._word.itemsize
        self.layout = _layout(layers)

    @property
    def blocks(self) -> int:
        """Blocks of the pool."""
        return self._views[0].shape[0]

    def empty(self, rows: int, *, pinned: bool = False, device: str = "cpu") -> Tensor:
        """Memory for rows [rows, layers, words], in the host's memory or on a device."""
        shape = (rows, *self.shape)
        return torch.empty(shape, dtype=self._word, pin_memory=pinned, device=device)

    def ids(self, blocks: Sequence[int]) -> Tensor:
        """Blocks [n] on the pool's device, by way of pinned memory: the host does not wait."""
        pinned = self.device.type == "cuda"
        ids = torch.tensor(blocks, dtype=torch.int64, device="cpu", pin_memory=pinned)
        return ids.to(self.device, non_blocking=True)

    def gather(self, ids: Tensor, target: Tensor) -> None:
        """Read the blocks `ids` [n] into `target` [n, layers, words]."""
        for view, rows in zip(self._views, self._split(target), strict=True):
            torch.index_select(view, 0, ids, out=rows)

    def scatter(self, ids: Tensor, source: Tensor) -> None:
        """Write `source` [n, layers, words] into the blocks `ids` [n]."""
        for view, rows in zip(self._views, self._split(source), strict=True):
            view.index_copy_(0, ids, rows)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks within the pool; each pair is (source, target), no target is a source."""
        step = max(1, _COPIED // self.row_bytes)
        for begin in range(0, len(pairs), step):
            sources, targets = zip(*pairs[begin : begin + step], strict=True)
            ids = self.ids([*sources, *targets]).view(2, -1)
            for view in self._views:
                view.index_copy_(0, ids[1], view.index_select(0, ids[0]))

    def _split(self, rows: Tensor) -> Sequence[Tensor]:
        return [rows] if self.one_kernel else torch.split(rows, 1, dim=1)


def _pages(layer: Tensor, word: torch.dtype) -> Tensor:
    """A layer as [blocks, words] of its own memory."""
    size = layer.element_size()
    sizes = zip(layer.shape[1:], layer.stride()[1:], strict=True)
    used = 1 + sum((length - 1) * stride for length, stride in sizes)
    if used != layer[0].numel():
        raise EngineError(f"the KV pool has blocks of {tuple(layer.shape[1:])} that are not dense")
    words = used * size // word.itemsize
    return torch.empty(0, dtype=word, device=layer.device).set_(
        layer.untyped_storage(),
        layer.storage_offset() * size // word.itemsize,
        (layer.shape[0], words),
        (layer.stride(0) * size // word.itemsize, 1),
    )


def _joined(views: Sequence[Tensor]) -> Tensor | None:
    """All layers as [blocks, layers, words], if they are at equal distances in one storage."""
    first = views[0]
    offsets = [view.storage_offset() for view in views]
    steps = {after - before for before, after in pairwise(offsets)} or {0}
    same = {(v.untyped_storage().data_ptr(), tuple(v.shape), v.stride()) for v in views}
    if len(same) > 1 or len(steps) > 1 or min(steps) < 0:
        return None
    shape = (first.shape[0], len(views), first.shape[1])
    return first.as_strided(shape, (first.stride(0), steps.pop(), 1))


def _word(layers: Sequence[Tensor]) -> torch.dtype:
    """The longest word that blocks and their distances are multiples of."""
    sizes = [
        length * layer.element_size()
        for layer in layers
        for length in (layer[0].numel(), layer.stride(0), layer.storage_offset())
    ]
    return next(word for word in _WORDS if all(size % word.itemsize == 0 for size in sizes))


def _layout(layers: Sequence[Tensor]) -> bytes:
    """What the bytes of a row mean besides the model: the order of a page's dimensions."""
    first = layers[0]
    strides = first.stride()[1:]
    order = sorted(range(len(strides)), key=strides.__getitem__)
    return repr((len(layers), tuple(first.shape[1:]), order, str(first.dtype))).encode()
