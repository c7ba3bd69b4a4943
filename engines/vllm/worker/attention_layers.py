"""Which attention layers picbench serves: one check for CPU and CUDA of what vLLM has built.

Names in a configuration do not say what a model's layers do: the same field is read by one model
and ignored by the next. The layers themselves are asked after the model is loaded.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8StaticTensorSym,
    kNvfp4Dynamic,
)
from vllm.v1.attention.backend import AttentionType

from picbench.errors import ConfigError
from picbench.kernels.shape import HeadShape

_KV_CACHE_DTYPES = ("auto", "float32", "float16", "bfloat16")
_NOT_CAUSAL: Mapping[str, str] = {
    AttentionType.ENCODER: "encoder attention",
    AttentionType.ENCODER_ONLY: "encoder attention",
    AttentionType.ENCODER_DECODER: "cross attention",
}


def check_layers(layers: Mapping[str, Any], attention: type) -> None:
    """Raise ConfigError, with every feature in one line, unless picbench serves all layers.

    `layers` is `static_forward_context` of vLLM's compilation config, in which every layer with
    state in the KV cache enters itself, among others. `attention` is the class that must run in
    each.
    """
    caching: list[Any] = [one for one in layers.values() if isinstance(one, AttentionLayerBase)]
    found = Counter(feature for layer in caching for feature in _unserved(layer, attention))
    if found:
        named = ", ".join(f"{name} ({n} of {len(caching)} layers)" for name, n in found.items())
        raise ConfigError(
            f"picbench does not support {named}",
            hint="use a model with full causal attention in every layer",
        )
    shapes = {(layer.num_heads, layer.num_kv_heads, layer.head_size) for layer in caching}
    if len(shapes) != 1:
        raise ConfigError(
            f"the model has {len(shapes)} shapes of attention heads",
            hint="picbench needs attention layers, all of one shape",
        )


def head_shape(vllm_config: Any) -> HeadShape:
    """The attention heads of one worker."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    return HeadShape(
        num_heads=model.get_num_attention_heads(parallel),
        num_kv_heads=model.get_num_kv_heads(parallel),
        head_size=model.get_head_size(),
        dtype=model.dtype,
    )


def _unserved(layer: Any, attention: type) -> Iterator[str]:
    """What a layer does that picbench's attention does not do; each under one name."""
    if isinstance(layer, Attention) and layer.attn_type in _NOT_CAUSAL:
        yield _NOT_CAUSAL[layer.attn_type]
    elif type(layer) is not Attention:
        # Mamba, MLA, chunked and linear attention: hybrid models have some of them.
        yield f"{type(layer).__name__} layers"
    elif not isinstance(layer.impl, attention):
        yield f"attention by {type(layer.impl).__name__}"
    else:
        yield from (name for name, has in _features(layer) if has)


def _features(layer: Attention) -> Iterator[tuple[str, bool]]:
    impl: Any = layer.impl
    yield "attention sinks", layer.has_sink or impl.sinks is not None
    yield "soft-capped logits", bool(impl.logits_soft_cap)
    yield "ALiBi", layer.use_alibi_sqrt or impl.alibi_slopes is not None
    yield "a sliding window", layer.sliding_window is not None
    yield "chunked attention", getattr(impl, "chunk_lookback", -1) >= 0
    yield "KV sharing between layers", layer.kv_sharing_target_layer_name is not None
    yield "bidirectional prefixes", layer.use_mm_prefix
    yield "values of another size than keys", layer.head_size_v != layer.head_size
    yield "a quantised KV cache", layer.kv_cache_dtype not in _KV_CACHE_DTYPES
    quantised = (kFp8StaticTensorSym, kNvfp4Dynamic)
    fused = any(impl.fused_output_quant_supported(key) for key in quantised)
    yield "quantised output of attention", fused
