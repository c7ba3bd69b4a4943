"""The first two layers of a model over a whole prompt, as far as the second one's keys and values.

CacheBlend computes them for all tokens before it decides which tokens go through the other layers
(arXiv 2405.16444, section 4.3). This is a forward pass of the model itself, in which attention
layers are replaced for a moment: the first attends to what was computed here, without a KV cache,
and the second ends the pass. So it knows nothing of the architecture.

Upstream: vllm/forward_context.py and vllm/compilation/decorators.py of vLLM 0.32.0.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
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

    def write(self, start: int, keys: Tensor, values: Tensor) -> None:
        """Write those of the tokens from `start` on; both are [n, kv_heads * head_size]."""
        stop = start + len(keys)
        self.keys[start:stop] = keys.view(stop - start, *self.keys.shape[1:])
        self.values[start:stop] = values.view(stop - start, *self.values.shape[1:])


class FirstLayers:
    """Computes the keys and values of a model's first two layers.

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
        self._model = model
        self._config = vllm_config
        self._rope = rope
        self._bare = bare
        self._key_positions = key_positions
        self._tokens = int(vllm_config.scheduler_config.max_num_batched_tokens)
        attending = (m for m in model.modules() if isinstance(getattr(m, "attn", None), Attention))
        self._layers: list[Any] = list(islice(attending, 2))

    @property
    def attentions(self) -> list[Any]:
        """vLLM's attention of both layers."""
        return [layer.attn for layer in self._layers]

    def run(self, prompt: Tensor) -> list[LayerKv]:
        """Keys and values of both layers for the tokens of `prompt` [tokens].

        Keys are rotated by the tokens' positions, from 0 on, or not at all if they are `bare`.
        """
        first, second = (self._empty(len(prompt), attention) for attention in self.attentions)
        rotated = self._empty(len(prompt), self.attentions[0]).keys if self._bare else first.keys
        for start in range(0, len(prompt), self._tokens):
            part = prompt[start : start + self._tokens]
            positions = torch.arange(start, start + len(part), device=prompt.device)
            attend = _Attend(self.attentions[0], first, rotated, self._rope, positions)
            with self._replaced(attend, _Record(second, start)):
                self._forward(part, positions)
        return [first, second]

    def _forward(self, tokens: Tensor, positions: Tensor) -> None:
        if self._key_positions is not None:
            self._key_positions.step = torch.zeros_like(positions)
        context = set_forward_context(
            None, self._config, num_tokens=len(tokens), skip_compiled=True
        )
        try:
            with context:
                self._model(
                    input_ids=tokens,
                    positions=positions,
                    intermediate_tensors=None,
                    inputs_embeds=None,
                )
        except _SecondLayerReached:
            pass

    @contextmanager
    def _replaced(self, *stand_ins: nn.Module) -> Iterator[None]:
        """Replace the attention of both layers for one pass."""
        kept = self.attentions
        try:
            for layer, stand_in in zip(self._layers, stand_ins, strict=True):
                layer.attn = stand_in
            yield
        finally:
            for layer, attention in zip(self._layers, kept, strict=True):
                layer.attn = attention

    @staticmethod
    def _empty(tokens: int, attention: Any) -> LayerKv:
        cache = attention.kv_cache
        shape = (tokens, attention.num_kv_heads, attention.head_size)
        return LayerKv(cache.new_empty(shape), cache.new_empty(shape))


class _SecondLayerReached(Exception):  # noqa: N818 - this is no error
    """Ends a pass: the keys and values of the second layer are known."""


class _Attend(nn.Module):
    """Takes the place of the first layer's attention: causal, over all tokens so far.

    `kv` gets the keys as they come, `rotated` with RoPE; it may be the same tensor.
    """

    def __init__(
        self, attention: Any, kv: LayerKv, rotated: Tensor, rope: RopeTable, positions: Tensor
    ) -> None:
        super().__init__()
        self._shape = (attention.num_heads, attention.head_size)
        self._scale = attention.impl.scale
        self._kv, self._rotated, self._rope = kv, rotated, rope
        self._positions = positions
        self._start = int(positions[0])

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of `query` [tokens, heads * head_size], rotated."""
        start, stop = self._start, self._start + len(query)
        self._kv.write(start, key, value)
        if self._rotated is not self._kv.keys:
            rows = self._rope.shift_rows(self._positions)
            keys = self._kv.keys[start:stop]
            self._rotated[start:stop] = rotate(keys, rows, is_neox=self._rope.is_neox)
        attended = _causal(
            query.view(-1, *self._shape),
            self._rotated[:stop],
            self._kv.values[:stop],
            float(self._scale),
        )
        return attended.reshape(query.shape)


class _Record(nn.Module):
    """Takes the place of the second layer's attention: notes its keys and values."""

    def __init__(self, kv: LayerKv, start: int) -> None:
        super().__init__()
        self._kv, self._start = kv, start

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write `key` and `value` and end the pass."""
        self._kv.write(self._start, key, value)
        raise _SecondLayerReached


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
