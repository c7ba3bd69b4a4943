"""LongRoPE with one table: an engine's longest prompt says once which frequencies it has.

Models with LongRoPE have two sets of frequencies: for prompts within the length that they were
trained with first, and for longer ones. vLLM chooses one for all prompts, by `max_model_len`, in a
module of its own kind. Here it gets its usual module with the table of that choice, so that all
that holds for such modules holds. The choice is part of the model's configuration, and so of what
names chunks in tiers.

Upstream: vllm/model_executor/layers/rotary_embedding/phi3_long_rope_scaled_rope.py of vLLM 0.32.0.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

#: Whether the frequencies are those for long prompts, beside a model's other rotary parameters.
LONG = "picbench_long"

_NAME = "Phi3LongRoPEScaledRotaryEmbedding"
_PARAMETERS = (
    "head_size, rotary_dim, max_position_embeddings, original_max_position_embeddings, base, "
    "is_neox_style, dtype, short_factor, long_factor, short_mscale, long_mscale"
)


class FixedLongRope(RotaryEmbedding):
    """Rotates as vLLM's `upstream` does by its frequencies for `long` prompts, or by the others."""

    def __init__(self, upstream: Any, *, long: bool) -> None:
        factors = upstream.long_factor if long else upstream.short_factor
        scale = upstream.long_mscale if long else upstream.short_mscale
        positions = upstream.max_position_embeddings
        self._compute = partial(upstream._compute_cos_sin_cache, positions, factors, scale)
        dtype = upstream.long_short_cos_sin_cache.dtype
        del upstream.long_short_cos_sin_cache
        sizes = upstream.head_size, upstream.rotary_dim, positions, upstream.base
        super().__init__(*sizes, is_neox_style=True, dtype=dtype)

    def _compute_cos_sin_cache(self) -> Tensor:
        table: Tensor = self._compute()
        return table


def fix_long_rope(extend: Callable[..., None]) -> None:
    """Have models whose configuration says so loaded with it, by `compat.extend`."""
    extend(rotary_embedding, _NAME, _fixed, _PARAMETERS)


def _fixed(upstream: Any, *args: Any, **named: Any) -> Any:
    made = upstream(*args, **named)
    rope = get_current_vllm_config().model_config.hf_text_config.rope_parameters
    return FixedLongRope(made, long=rope[LONG]) if LONG in rope else made
