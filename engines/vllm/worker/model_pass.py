"""Forward passes of a model beside vLLM's own, in which attention layers are replaced.

Tokens are picked by such passes before a request runs. They are the model's own forward, so they
know nothing of the architecture.

Upstream: vllm/forward_context.py and vllm/compilation/decorators.py of vLLM 0.32.0.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention

from picbench.engines.vllm.worker.rotary import KeyPositions
from picbench.kernels.rope import RopeTable


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

    def run(self, tokens: Tensor, positions: Tensor, stand_ins: Sequence[nn.Module]) -> None:
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
    def _replaced(self, stand_ins: Sequence[nn.Module]) -> Iterator[None]:
        """Replace the attention of the first layers for one pass."""
        kept = self.attentions
        try:
            for layer, stand_in in zip(self._layers, stand_ins, strict=False):
                layer.attn = stand_in
            yield
        finally:
            for layer, attention in zip(self._layers, kept, strict=True):
                layer.attn = attention
