"""How much of a question's attention each token of the chunks gets.

This is a pass of the model over what a request computes in any case: text, and tokens whose link is
known. Its layers attend to the chunks' canonical KV in the cache and to one another, so that the
question is understood as with nothing linked. What is summed is the softmax of the question's
tokens, over them, all heads and all layers (after the idea of ProphetKV, arXiv 2602.02579).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from picbench.engines.vllm.worker.model_pass import LayerKv, ModelPass
from picbench.kernels.rope import rotate

#: (KV cache of a layer, flat slots [n]) -> keys and values there, both [n, kv_heads, head_size].
ReadKv = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

#: Scores of attention that are computed at a time, in float32: 64 MiB.
SCORES = 1 << 24


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Tokens in the KV cache: their `slots`, `positions` and `cached_at`, all [tokens] int64."""

    slots: Tensor
    positions: Tensor
    cached_at: Tensor


class QuestionAttention:
    """Measures attention to canonical KV; `read` reads it from the cache."""

    def __init__(self, model_pass: ModelPass, read: ReadKv) -> None:
        self._pass = model_pass
        self._read = read

    def run(self, tokens: Tensor, positions: Tensor, cached: CachedTokens, question: int) -> Tensor:
        """What each cached token gets [cached] of the question's attention, in float32.

        `tokens` [n] at `positions` [n] ascending, both int64, are computed. Those from the position
        `question` on are the question. With tensor parallelism it is the attention of one's own
        heads.
        """
        mass = torch.zeros(len(cached.slots), device=tokens.device)
        attentions = self._pass.attentions
        own = [LayerKv.empty(len(tokens), attention) for attention in attentions]
        for start in range(0, len(tokens), self._pass.tokens):
            part = slice(start, start + self._pass.tokens)
            seen = positions[: part.stop]
            stand_ins = [
                _MeasuredAttention(self, attention, kv, cached, seen, start, question, mass)
                for attention, kv in zip(attentions, own, strict=True)
            ]
            self._pass.run(tokens[part], positions[part], stand_ins)
        return mass

    def canonical(self, attention: Any, cached: CachedTokens) -> LayerKv:
        """The KV of cached tokens in one layer, keys rotated to their positions."""
        keys, values = self._read(attention.kv_cache, cached.slots)
        shifts = cached.positions if self._pass.bare else cached.positions - cached.cached_at
        return LayerKv(self._rotate(keys, shifts), values)

    def rotated(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Computed keys with RoPE, as the model left them without or with it."""
        return self._rotate(keys, positions) if self._pass.bare else keys

    def _rotate(self, keys: Tensor, shifts: Tensor) -> Tensor:
        rope = self._pass.rope
        return rotate(keys, rope.shift_rows(shifts), is_neox=rope.is_neox)


class _MeasuredAttention(nn.Module):
    """Takes the place of a layer's attention for the tokens from `start` on.

    `positions` are those of all tokens so far, `own` has the layer's KV of the ones before and gets
    that of the others, with RoPE. What the question attends to is added to `mass` [cached].
    """

    def __init__(
        self,
        parent: QuestionAttention,
        attention: Any,
        own: LayerKv,
        cached: CachedTokens,
        positions: Tensor,
        start: int,
        question: int,
        mass: Tensor,
    ) -> None:
        super().__init__()
        self._parent, self._attention, self._own = parent, attention, own
        self._cached, self._positions, self._start = cached, positions, start
        self._question, self._mass = question, mass

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of `query` [tokens, heads * head_size], rotated."""
        start, stop, layer = self._start, self._start + len(query), self._attention
        self._own.write(start, key, value)
        fresh = self._parent.rotated(self._own.keys[start:stop], self._positions[start:stop])
        self._own.keys[start:stop] = fresh
        canonical = self._parent.canonical(layer, self._cached)
        keys = torch.cat([canonical.keys, self._own.keys[:stop]]).float()
        values = torch.cat([canonical.values, self._own.values[:stop]]).float()
        at = torch.cat([self._cached.positions, self._positions[:stop]])
        groups = layer.num_heads // layer.num_kv_heads
        queries = query.view(-1, layer.num_kv_heads, groups, layer.head_size).float()
        attended = torch.empty_like(queries)
        rows = max(1, SCORES // (layer.num_heads * len(keys)))
        for begin in range(0, len(query), rows):
            part = slice(begin, begin + rows)
            where = self._positions[start:stop][part]
            scores = torch.einsum("qhgd,khd->hgqk", queries[part], keys) * layer.impl.scale
            scores.masked_fill_(at > where.unsqueeze(1), float("-inf"))
            weights = scores.softmax(-1)
            asking = weights[:, :, where >= self._question, : len(self._mass)]
            self._mass += asking.sum(dim=(0, 1, 2))
            attended[part] = torch.einsum("hgqk,khd->qhgd", weights, values)
        return attended.to(query.dtype).reshape(query.shape)
