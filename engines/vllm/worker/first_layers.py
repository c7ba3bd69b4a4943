"""The first two layers of a model over a whole prompt, as far as the second one's keys and values.

CacheBlend computes them for all tokens before it decides which tokens go through the other layers
(arXiv 2405.16444, section 4.3). In this pass of the model the first layer attends to what was
computed here, without a KV cache, and the second ends the pass.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from picbench.engines.vllm.worker.model_pass import LayerKv, ModelPass, PassEnded
from picbench.kernels.rope import RopeTable, rotate


class FirstLayers:
    """Computes the keys and values of a model's first two layers."""

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
        attentions, rope = self.attentions, self._pass.rope
        first, second = (LayerKv.empty(len(prompt), attention) for attention in attentions)
        rotated = first.keys
        if self._pass.bare:
            rotated = LayerKv.empty(len(prompt), attentions[0]).keys
        for start in range(0, len(prompt), self._pass.tokens):
            part = prompt[start : start + self._pass.tokens]
            positions = torch.arange(start, start + len(part), device=prompt.device)
            attend = _Attend(attentions[0], first, rotated, rope, positions)
            self._pass.run(part, positions, [attend, _Record(second, start)])
        return [first, second]


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
        raise PassEnded


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
