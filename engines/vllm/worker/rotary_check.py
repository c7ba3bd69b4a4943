"""Whether re-rotating a key gives the key that the model has at the other position."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from picbench.kernels.rope import RopeTable, rotate

#: Largest error that passes, of keys whose elements are about 1, by type.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 1e-2}

#: From, to: chunks are cached at the first positions and read anywhere, also before those.
_FROM, _TO = (0, 0, 1, 40, 300), (0, 7, 300, 40, 11)


def rotary_error(model: nn.Module, rope: RopeTable, head_size: int, dtype: torch.dtype) -> float:
    """The largest error of keys that the model rotates to one position and `rope` to another.

    `rope` may be rounded to the model's type `dtype`. Positions beyond the model's are left out.
    """
    rotary = next(m for m in model.modules() if isinstance(m, RotaryEmbedding))
    device = rotary.cos_sin_cache.device
    last = len(rope.cos_sin_cache) - 1
    start, end = (torch.tensor(p, device=device).clamp(max=last) for p in (_FROM, _TO))
    noise = torch.Generator().manual_seed(0)
    key = torch.randn(len(start), 1, head_size, generator=noise).to(device, dtype)
    before, rows = _rotated(rotary, start, key), rope.shift_rows(end - start)
    moved = rotate(before, rows, is_neox=rope.is_neox)
    error = (moved.float() - _rotated(rotary, end, key).float()).abs().max()
    return float(error)


def _rotated(rotary: Callable[..., tuple[Tensor, Tensor]], at: Tensor, key: Tensor) -> Tensor:
    """The model's rotation of `key` [n, 1, head_size] to positions [n]."""
    flat = key.flatten(1).clone()
    return rotary(at, flat.clone(), flat)[1].view_as(key)
