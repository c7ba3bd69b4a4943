"""Forward passes of a model beside vLLM's own, in which attention layers are replaced.

Tokens are picked by such passes before a request runs. They are the model's own forward, so they
know nothing of the architecture.

Upstream: vllm/forward_context.py and vllm/compilation/decorators.py of vLLM 0.32.0.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention

from picbench.engines.vllm.worker.rotary import KeyPositions
from picbench.kernels.rope import RopeTable, rotate


@dataclass(frozen=True, slots=True)
class LayerKv:
    """Keys and values of one layer, both [tokens, kv_heads, head_size]."""

    keys: Tensor
    values: Tensor

    @classmethod
    def empty(cls, tokens: int, attention: Any) -> "LayerKv":
        """Room for the KV of so many tokens in a layer with vLLM's `attention`."""
        cache = attention.kv_cache
        shape = (tokens, attention.num_kv_heads, attention.head_size)
        return cls(cache.new_empty(shape), cache.new_empty(shape))

    def write(self, start: int, keys: Tensor, values: Tensor) -> None:
        """Write those of the tokens from `start` on; both are [n, kv_heads * head_size]."""
        stop = start + len(keys)
        self.keys[start:stop] = keys.view(stop - start, *self.keys.shape[1:])
        self.values[start:stop] = values.view(stop - start, *self.values.shape[1:])


#: What takes the place of a layer's attention: from query (rotated), key and value to its output.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class _StandIn(nn.Module):
    """A module, as which layers have their attention."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.forward = attend


class PassEnded(Exception):  # noqa: N818 - this is no error
    """Ends a pass: what it was for is known."""


class ModelPass:
    """Runs a model with stand-ins for its attention.

    `rope` is the model's. `bare` says that the model, whose rotary modules are picbench's, leaves
    keys without RoPE; `key_positions` are those that such modules read. At most `tokens` are
    computed at a time, as many as vLLM measured memory for.
    """

    def __init__(
        self,
        model: nn.Module,
        vllm_config: Any,
        rope: RopeTable,
        *,
        bare: bool,
        key_positions: KeyPositions | None = None,
    ) -> None:
        self.rope = rope
        self.bare = bare
        self.tokens = int(vllm_config.scheduler_config.max_num_batched_tokens)
        self._model = model
        self._config = vllm_config
        self._key_positions = key_positions
        self._layers: list[Any] = [
            m for m in model.modules() if isinstance(getattr(m, "attn", None), Attention)
        ]

    @property
    def attentions(self) -> list[Any]:
        """vLLM's attention of all layers."""
        return [layer.attn for layer in self._layers]

    def run(self, tokens: Tensor, positions: Tensor, stand_ins: Sequence[Attend]) -> None:
        """Run the model over `tokens` [n] at `positions` [n], in int64.

        `stand_ins` are called in the place of the first layers' attention, with its arguments; one
        that raises `PassEnded` ends the pass, and so has to where they are fewer than the layers.
        """
        if self._key_positions is not None:
            self._key_positions.step = torch.zeros_like(positions)
        context = set_forward_context(
            None, self._config, num_tokens=len(tokens), skip_compiled=True
        )
        try:
            with self._replaced(stand_ins), context:
                self._model(
                    input_ids=tokens,
                    positions=positions,
                    intermediate_tensors=None,
                    inputs_embeds=None,
                )
        except PassEnded:
            pass

    @contextmanager
    def _replaced(self, stand_ins: Sequence[Attend]) -> Iterator[None]:
        """Replace the attention of the first layers for one pass."""
        kept = self.attentions
        try:
            for layer, stand_in in zip(self._layers, stand_ins, strict=False):
                layer.attn = _StandIn(stand_in)
            yield
        finally:
            for layer, attention in zip(self._layers, kept, strict=True):
                layer.attn = attention


class FirstLayers:
    """Computes the keys and values of a model's first two layers over a whole prompt.

    CacheBlend needs them for all tokens before it decides which tokens go through the other layers
    (arXiv 2405.16444, section 4.3). The first layer attends to what was computed here, without a KV
    cache, and the second ends the pass.
    """

    def __init__(self, model_pass: ModelPass) -> None:
        self._pass = model_pass

    @property
    def attentions(self) -> list[Any]:
        """vLLM's attention of both layers."""
        return self._pass.attentions[:2]

    def run(self, prompt: Tensor) -> list[LayerKv]:
        """Keys and values of both layers for the tokens of `prompt` [tokens].

        Keys are rotated by the tokens' positions, from 0 on, or not at all if the model leaves them
        without RoPE.
        """
        attentions = self.attentions
        first, second = (LayerKv.empty(len(prompt), attention) for attention in attentions)
        rotated = first.keys
        if self._pass.bare:
            rotated = LayerKv.empty(len(prompt), attentions[0]).keys

        def record(start: int, _: Tensor, key: Tensor, value: Tensor) -> Tensor:
            second.write(start, key, value)
            raise PassEnded

        for start in range(0, len(prompt), self._pass.tokens):
            part = prompt[start : start + self._pass.tokens]
            positions = torch.arange(start, start + len(part), device=prompt.device)
            attend = partial(self._attend, attentions[0], first, rotated, positions, start)
            self._pass.run(part, positions, [attend, partial(record, start)])
        return [first, second]

    def _attend(
        self,
        attention: Any,
        kv: LayerKv,
        rotated: Tensor,
        positions: Tensor,
        start: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        """The first layer's attention for the tokens from `start` on: causal, over all so far.

        `kv` gets the keys as they come, `rotated` with RoPE; it may be the same tensor.
        """
        stop, rope = start + len(query), self._pass.rope
        kv.write(start, key, value)
        if rotated is not kv.keys:
            rows = rope.shift_rows(positions)
            rotated[start:stop] = rotate(kv.keys[start:stop], rows, is_neox=rope.is_neox)
        queries = query.view(-1, attention.num_heads, attention.head_size)
        scale = float(attention.impl.scale)
        attended = _causal(queries, rotated[:stop], kv.values[:stop], scale)
        return attended.reshape(query.shape)


def _causal(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attention of the last tokens, all [tokens, heads, head_size], to themselves and all before.

    Keys have fewer heads and are repeated, because PyTorch's kernels for a part of the queries do
    not take them as they are.
    """
    groups = query.shape[1] // key.shape[1]
    query, key, value = (
        x.transpose(0, 1).unsqueeze(0)
        for x in (query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1))
    )
    whole = query.shape[2] == key.shape[2]
    mask: Any = None if whole else causal_lower_right(query.shape[2], key.shape[2])
    attended = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=whole, scale=scale
    )
    return attended.squeeze(0).transpose(0, 1)


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
    """Measures how much of a question's attention each token of the chunks gets.

    Its pass is over what a request computes in any case: text, and tokens whose link is known.
    Layers attend to the chunks' canonical KV, which `read` reads from the cache, and to one
    another, so that the question is understood as with nothing linked. What is summed is the
    softmax of the question's tokens, over them, all heads and all layers (after the idea of
    ProphetKV, arXiv 2602.02579).
    """

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
                partial(self._attend, attention, kv, cached, seen, start, question, mass)
                for attention, kv in zip(attentions, own, strict=True)
            ]
            self._pass.run(tokens[part], positions[part], stand_ins)
        return mass

    def _attend(
        self,
        layer: Any,
        own: LayerKv,
        cached: CachedTokens,
        positions: Tensor,
        start: int,
        question: int,
        mass: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        """A layer's attention for the tokens from `start` on.

        `positions` are those of all tokens so far, `own` has the layer's KV of the ones before and
        gets that of the others, with RoPE. What the question attends to is added to `mass`.
        """
        stop = start + len(query)
        own.write(start, key, value)
        if self._pass.bare:
            own.keys[start:stop] = self._rotate(own.keys[start:stop], positions[start:stop])
        cached_keys, cached_values = self._read(layer.kv_cache, cached.slots)
        shifts = cached.positions if self._pass.bare else cached.positions - cached.cached_at
        keys = torch.cat([self._rotate(cached_keys, shifts), own.keys[:stop]]).float()
        values = torch.cat([cached_values, own.values[:stop]]).float()
        at = torch.cat([cached.positions, positions[:stop]])
        groups = layer.num_heads // layer.num_kv_heads
        queries = query.view(-1, layer.num_kv_heads, groups, layer.head_size).float()
        attended = torch.empty_like(queries)
        rows = max(1, SCORES // (layer.num_heads * len(keys)))
        for begin in range(0, len(query), rows):
            part = slice(begin, begin + rows)
            where = positions[start:stop][part]
            scores = torch.einsum("qhgd,khd->hgqk", queries[part], keys) * layer.impl.scale
            scores.masked_fill_(at > where.unsqueeze(1), float("-inf"))
            weights = scores.softmax(-1)
            asking = weights[:, :, where >= question, : len(mass)]
            mass += asking.sum(dim=(0, 1, 2))
            attended[part] = torch.einsum("hgqk,khd->qhgd", weights, values)
        return attended.to(query.dtype).reshape(query.shape)

    def _rotate(self, keys: Tensor, shifts: Tensor) -> Tensor:
        rope = self._pass.rope
        return rotate(keys, rope.shift_rows(shifts), is_neox=rope.is_neox)
