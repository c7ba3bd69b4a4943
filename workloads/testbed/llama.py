"""The testbed model in torch: Hugging Face's LlamaForCausalLM, tensor names included.

The library's model does not offer what training and the study of position-independent reuse need:
a mask of any shape, and keys and values in the order of the slots.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

#: Keys and values of one layer: (batch, heads, slots, head size), keys with RoPE.
Cache = tuple[Tensor, Tensor]
#: Which slots a query sees: (batch, 1, queries, slots), or a sparse mask, to be compiled.
Mask = Tensor | BlockMask


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The sizes of a Llama."""

    vocabulary: int
    width: int = 384
    layers: int = 8
    heads: int = 6
    kv_heads: int = 2
    head_size: int = 64
    inner: int = 896
    context: int = 4096
    theta: float = 10_000.0
    epsilon: float = 1e-5

    @classmethod
    def of(cls, config: dict[str, Any]) -> "LlamaShape":
        """The sizes in a ``config.json``."""
        return cls(
            vocabulary=config["vocab_size"],
            width=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_size=config["head_dim"],
            inner=config["intermediate_size"],
            context=config["max_position_embeddings"],
            theta=config["rope_theta"],
            epsilon=config["rms_norm_eps"],
        )


class LlamaRMSNorm(nn.Module):
    """Root-mean-square norm."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape.width))
        self._epsilon = shape.epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return functional.rms_norm(x, x.shape[-1:], self.weight, self._epsilon)


class LlamaAttention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self._shape = shape
        inner, kv = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        self.q_proj = nn.Linear(shape.width, inner, bias=False)
        self.k_proj = nn.Linear(shape.width, kv, bias=False)
        self.v_proj = nn.Linear(shape.width, kv, bias=False)
        self.o_proj = nn.Linear(inner, shape.width, bias=False)

    def forward(
        self, x: Tensor, rope: Tensor, mask: Mask | None, past: Cache | None
    ) -> tuple[Tensor, Cache]:
        """Attend; without a mask causally. Returns the output and all keys and values."""
        q, k, v = (self._split(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = _rotate(q, rope), _rotate(k, rope)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        out = self._attend(q, k, v, mask)
        return self.o_proj(out.transpose(1, 2).flatten(2)), (k, v)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Tensor:
        attend = functional.scaled_dot_product_attention
        if mask is None:
            return attend(q, k, v, is_causal=True, enable_gqa=True)
        if isinstance(mask, BlockMask):
            return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        # No fused kernel takes both a mask and grouped heads. In decoding the heads of a group are
        # passed as queries, which share a mask, so that no key is copied.
        if q.shape[2] == 1:
            grouped = q.view(len(q), k.shape[1], -1, q.shape[-1])
            return attend(grouped, k, v, attn_mask=mask).reshape_as(q)
        group = self._shape.heads // self._shape.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        return attend(q, k, v, attn_mask=mask)

    def _split(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        return x.view(rows, tokens, -1, self._shape.head_size).transpose(1, 2)


class LlamaMLP(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply to every position."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class LlamaDecoderLayer(nn.Module):
    """A decoder layer."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.input_layernorm = LlamaRMSNorm(shape)
        self.self_attn = LlamaAttention(shape)
        self.post_attention_layernorm = LlamaRMSNorm(shape)
        self.mlp = LlamaMLP(shape)

    def forward(
        self, x: Tensor, rope: Tensor, mask: Mask | None, past: Cache | None
    ) -> tuple[Tensor, Cache]:
        """Return the layer's output and its keys and values."""
        attended, cache = self.self_attn(self.input_layernorm(x), rope, mask, past)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class LlamaModel(nn.Module):
    """Embeddings, layers and the last norm."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(LlamaDecoderLayer(shape) for _ in range(shape.layers))
        self.norm = LlamaRMSNorm(shape)


class Llama(nn.Module):
    """A Llama whose output embeddings are its input embeddings."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = LlamaModel(shape)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Mask | None = None,
        past: list[Cache] | None = None,
    ) -> tuple[Tensor, list[Cache]]:
        """Return the last hidden states (batch, tokens, width) and every layer's cache.

        `ids` and `positions` are (batch, tokens); `mask` is (batch, 1, tokens, past + tokens),
        True where a query sees a slot, its sparse form, or None for plain causal attention
        without a past.
        """
        x = self.model.embed_tokens(ids)
        rope = self._rope(positions)
        caches: list[Cache] = []
        for index, layer in enumerate(self.model.layers):
            x, cache = layer(x, rope, mask, past[index] if past else None)
            caches.append(cache)
        return self.model.norm(x), caches

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary."""
        return functional.linear(hidden, self.model.embed_tokens.weight)

    def _rope(self, positions: Tensor) -> Tensor:
        """Cosines and sines: (2, batch, 1, tokens, head size / 2), in float32."""
        half = torch.arange(0, self.shape.head_size, 2, device=positions.device)
        angle = positions[:, None, :, None] * self.shape.theta ** (-half / self.shape.head_size)
        return torch.stack((angle.cos(), angle.sin()))


def _rotate(x: Tensor, rope: Tensor) -> Tensor:
    cos, sin = rope
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
