"""Rotary embedding for keys that are cached without RoPE.

A canonical block is read at many positions, so its keys are cached without RoPE and rotated when
they are read. Every other block is found only after one prefix and has one position; its keys are
cached with RoPE, which costs nothing and lets attention read them in place.

Yarn scales what it rotates by a factor. Every cached key has it once: the model's module applies
it, to keys that are cached without RoPE at position 0, where it rotates nothing. What re-rotates
keys later is of unit length (`RopeTable`).
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from picbench.engines.vllm.compat import check_signature
from picbench.errors import ConfigError, EngineError
from picbench.kernels.rope import RopeTable, unit_length


class KeyPositions:
    """Positions that a step's keys are rotated to: `step` [tokens] int64; None: as queries are."""

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
    """Replaces a layer's rotary module and rotates queries only.

    Keys get no more than the factor of a rotary embedding that has one.
    """

    def __init__(self, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.rotary = rotary
        self._scaled = float(rotary.cos_sin_cache[0, 0]) != 1

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate `query` [tokens, heads * head_size] by logical `positions` [tokens]."""
        query, _ = self.rotary(positions, query, None)
        if self._scaled:
            key, _ = self.rotary(torch.zeros_like(positions), key, None)
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
    """How all attention layers of a model rotate keys, without a factor that scales them.

    The model rounds its table to its own type; `exact` keeps float32. Raises ConfigError for models
    whose layers do not follow the pattern `q, k = self.rotary_emb(positions, q, k)` with one set of
    parameters, and for rotary embeddings that are not rotations by position times frequency.
    """
    check_signature(RotaryEmbedding.forward_native, "self, positions, query, key")
    check_signature(RotaryEmbedding._compute_cos_sin_cache, "self")
    rotary = _shared_rotary(model)
    kept = rotary.cos_sin_cache
    try:
        # Checked where it was computed: what the check costs in memory is the host's.
        table, _ = unit_length(rotary._compute_cos_sin_cache())
        table = table.to(kept.device) if exact else table.to(kept)
        return RopeTable(table, rotary.rotary_dim, rotary.is_neox_style)
    except EngineError as error:
        name = type(rotary).__name__
        raise ConfigError(
            f"rotary embedding {name} is not supported: {error.message}", hint=error.hint
        ) from error


def _shared_rotary(model: nn.Module) -> RotaryEmbedding:
    rotaries = [rotary for _, rotary in _rotating_layers(model)]
    attentions = sum(isinstance(module, Attention) for module in model.modules())
    if not rotaries or len(rotaries) != attentions:
        raise ConfigError(
            f"{type(model).__name__} rotates {len(rotaries)} of {attentions} attention layers",
            hint="picbench serves Llama-like models, with RoPE in every layer",
        )
    first = rotaries[0]
    for other in rotaries[1:]:
        same = torch.equal(other.cos_sin_cache, first.cos_sin_cache)
        if not same or other.is_neox_style != first.is_neox_style:
            raise ConfigError(
                "layers rotate with different parameters", hint="picbench needs one RoPE per model"
            )
    return first


def _rotating_layers(model: nn.Module) -> Iterator[tuple[nn.Module, RotaryEmbedding]]:
    for module in list(model.modules()):
        rotary = getattr(module, "rotary_emb", None)
        if isinstance(getattr(module, "attn", None), Attention) and rotary is not None:
            if not isinstance(rotary, RotaryEmbedding) or _rotates_otherwise(rotary):
                raise ConfigError(
                    f"rotary embedding {type(rotary).__name__} is not supported",
                    hint="picbench needs vLLM's RotaryEmbedding, or a subclass with another table",
                )
            yield module, rotary


def _rotates_otherwise(rotary: RotaryEmbedding) -> bool:
    """Whether a subclass has a way to rotate of its own, which its table does not tell."""
    ways = ("forward_static", "forward_native", "forward_cuda", "forward_cpu")
    return any(getattr(type(rotary), way) is not getattr(RotaryEmbedding, way) for way in ways)
