"""Rotary embedding for keys that are cached without RoPE.

A canonical block is read at many positions, so its keys are cached without RoPE and rotated when
they are read. Every other block is found only after one prefix and has one position; its keys are
cached with RoPE, which costs nothing and lets attention read them in place.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from picbench.engines.vllm.compat import check_signature
from picbench.errors import ConfigError
from picbench.kernels.rope import RopeTable


class KeyPositions:
    """The positions that the keys of a step are rotated to; the model runner sets them.

    `step` [tokens] int64, or None if keys are rotated like queries.
    """

    def __init__(self) -> None:
        self.step: Tensor | None = None


class SplitRotary(nn.Module):
    """Replaces a layer's rotary module and rotates keys to positions of their own."""

    def __init__(self, rotary: RotaryEmbedding, keys: KeyPositions) -> None:
        super().__init__()
        self.rotary = rotary
        self._keys = keys

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate `query` [tokens, heads * head_size] by logical `positions` [tokens], and `key`."""
        if self._keys.step is None:
            rotated: tuple[Tensor, Tensor] = self.rotary(positions, query, key)
            return rotated
        query, _ = self.rotary(positions, query, None)
        key, _ = self.rotary(self._keys.step, key, None)
        return query, key


class QueryRotary(nn.Module):
    """Replaces a layer's rotary module and rotates queries only."""

    def __init__(self, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate `query` [tokens, heads * head_size] by logical `positions` [tokens]."""
        query, _ = self.rotary(positions, query, None)
        return query, key


def replace_rotary(
    model: nn.Module, wrap: Callable[[RotaryEmbedding], nn.Module], *, exact: bool = False
) -> RopeTable:
    """Replace the rotary module of every attention layer by `wrap` of it.

    The module that layers shared is not changed. Returns and raises what `rope_table` does.
    """
    table = rope_table(model, exact=exact)
    for layer, rotary in _rotating_layers(model):
        layer.rotary_emb = wrap(rotary)
    return table


def rope_table(model: nn.Module, *, exact: bool = False) -> RopeTable:
    """The rotary parameters that all attention layers of a model share.

    The model rounds them to its own type; `exact` recomputes them in float32. Raises ConfigError
    for models whose layers do not follow the pattern `q, k = self.rotary_emb(positions, q, k)` with
    one set of parameters.
    """
    check_signature(RotaryEmbedding.forward_native, ("self", "positions", "query", "key"))
    rotaries = [rotary for _, rotary in _rotating_layers(model)]
    attentions = sum(isinstance(module, Attention) for module in model.modules())
    if not rotaries or len(rotaries) != attentions:
        raise ConfigError(
            f"{type(model).__name__} rotates {len(rotaries)} of {attentions} attention layers",
            hint="picbench serves Llama-like models, with RoPE in every layer",
        )
    first = rotaries[0]
    if any(not torch.equal(r.cos_sin_cache, first.cos_sin_cache) for r in rotaries[1:]):
        raise ConfigError(
            "layers rotate with different parameters", hint="picbench needs one RoPE per model"
        )
    table = RopeTable(first.cos_sin_cache, first.rotary_dim, first.is_neox_style)
    if not exact:
        return table
    check_signature(RotaryEmbedding._compute_cos_sin_cache, ("self",))
    cache = first._compute_cos_sin_cache().to(table.cos_sin_cache.device)
    return replace(table, cos_sin_cache=cache)


def _rotating_layers(model: nn.Module) -> Iterator[tuple[nn.Module, RotaryEmbedding]]:
    for module in list(model.modules()):
        rotary = getattr(module, "rotary_emb", None)
        if isinstance(getattr(module, "attn", None), Attention) and rotary is not None:
            if not isinstance(rotary, RotaryEmbedding):
                raise ConfigError(
                    f"rotary embedding {type(rotary).__name__} is not supported",
                    hint="picbench needs vLLM's RotaryEmbedding or a subclass",
                )
            yield module, rotary
