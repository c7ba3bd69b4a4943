"""Whether what a model caches depends on positions by its rotary embedding alone, as `rope` says.

A model may change keys after it has rotated them: some normalise them there, with a weight for each
dimension. Such a key cannot be re-rotated, and nothing in the model says so. So each attention
block is run on the same hidden states at two positions; what reaches its attention layer must be
the same values, and keys that differ by the rotation.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from picbench.errors import ConfigError
from picbench.kernels.rope import RopeTable, rotate

#: Largest error of keys that passes, relative to their size: roundings of the model's type.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 4e-3}

#: Positions of the hidden states, the first and the second time.
_FROM, _TO = (0, 1, 2, 40, 90, 7, 33, 64), (40, 3, 90, 41, 2, 100, 0, 65)

#: Largest error of re-rotated keys that passes, of keys whose elements are about 1, by type.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 1e-2}

#: Chunks are cached at the first of these positions and read anywhere, also before those.
_CACHED, _READ = (0, 0, 1, 40, 300), (0, 7, 300, 40, 11)


class _Seen(Exception):  # noqa: N818
    """Leaves a block when its attention layer is reached."""


def check_keys(model: nn.Module, rope: RopeTable, hidden_size: int, dtype: torch.dtype) -> None:
    """Raise ConfigError unless keys of every attention block can be re-rotated by `rope`.

    The model's rotary modules are its own; its blocks take `hidden_size` numbers of `dtype`.
    """
    device = rope.cos_sin_cache.device
    last = rope.positions - 1
    first, second = (torch.tensor(p, device=device).clamp(max=last) for p in (_FROM, _TO))
    noise = torch.Generator().manual_seed(0)
    hidden = torch.randn(len(first), hidden_size, generator=noise).to(device, dtype)
    rows = rope.shift_rows(second - first)
    for block in _blocks(model):
        (before, kept), (after, value) = (_cached(block, at, hidden) for at in (first, second))
        heads = (len(first), -1, block.attn.head_size)
        moved = rotate(before.view(heads), rows, is_neox=rope.is_neox)
        error = max(_distance(moved, after.view(heads)), _distance(kept, value))
        if not error <= _TOLERANCE[dtype]:
            raise ConfigError(
                f"{type(block).__name__} changes keys or values by their positions in another way "
                f"than by its rotary embedding (off by {error:.2g})",
                hint="picbench re-rotates keys; use a model that rotates them last",
            )


def _blocks(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        rotates = getattr(module, "rotary_emb", None) is not None
        if rotates and isinstance(getattr(module, "attn", None), Attention):
            yield module


@torch.no_grad()
def _cached(block: Any, positions: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and values that reach a block's attention layer."""
    found: list[tuple[Tensor, Tensor]] = []

    def see(_: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
        found.append((inputs[1].clone(), inputs[2].clone()))
        raise _Seen

    hook = block.attn.register_forward_pre_hook(see)
    try:
        block(**_arguments(block, positions, hidden))
    except _Seen:
        return found[0]
    finally:
        hook.remove()
    raise ConfigError(f"{type(block).__name__} did not call its attention layer")


def _arguments(block: nn.Module, positions: Tensor, hidden: Tensor) -> dict[str, Tensor]:
    """What a block is called with. Raises ConfigError if it needs more than vLLM's blocks do."""
    known = {"positions": positions, "position_ids": positions, "hidden_states": hidden.clone()}
    parameters = inspect.signature(block.forward).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind < p.VAR_POSITIONAL]
    if unknown := [name for name in needed if name not in known]:
        raise ConfigError(
            f"{type(block).__name__} computes keys from {', '.join(unknown)}, too",
            hint="picbench serves Llama-like models, with RoPE in every layer",
        )
    return {name: known[name] for name in needed}


def _distance(found: Tensor, expected: Tensor) -> float:
    """Relative to the size of `expected`; keys that are 0 are at no distance from themselves."""
    size = expected.float().norm().clamp(min=torch.finfo(torch.float32).tiny)
    return float((found.float() - expected.float()).norm() / size)


def rotary_error(model: nn.Module, rope: RopeTable, head_size: int, dtype: torch.dtype) -> float:
    """The largest error of keys that the model rotates to one position and `rope` to another.

    `rope` may be rounded to the model's type `dtype`. Positions beyond the model's are left out.
    """
    rotary = next(m for m in model.modules() if isinstance(m, RotaryEmbedding))
    device = rotary.cos_sin_cache.device
    last = rope.positions - 1
    start, end = (torch.tensor(p, device=device).clamp(max=last) for p in (_CACHED, _READ))
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
