"""Attention features: refused by what the layers are, whichever device they are built for.

Most models that have such layers are refused rows of `workloads/models/architectures.py`, whose
test starts an engine with each.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GptOssConfig
from vllm.config import CacheConfig, DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl

from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.vllm.worker.attention_layers import check_layers
from picbench.engines.vllm.worker.cpu.backend import PicAttention, PicAttentionBackend
from picbench.engines.vllm.worker.cuda.backend import (
    PicFlashBackend,
    PicTritonBackend,
    SplitAttention,
    TritonSplitAttention,
)
from picbench.errors import ConfigError

BACKENDS = {
    "CPU": (PicAttentionBackend, PicAttention),
    "FlashAttention": (PicFlashBackend, SplitAttention),
    "Triton": (PicTritonBackend, SplitAttention),
}

FEATURES: dict[str, dict[str, Any]] = {
    "attention sinks": {"sinks": torch.zeros(4)},
    "soft-capped logits": {"logits_soft_cap": 30.0},
    "ALiBi": {"alibi_slopes": [0.5, 0.25, 0.1, 0.05]},
    "a sliding window": {"per_layer_sliding_window": 64},
    "KV sharing between layers": {"kv_sharing_target_layer_name": "layers.0.attn"},
    "cross attention": {"attn_type": "encoder_decoder"},
    "encoder attention": {"attn_type": "encoder_only"},
    "values of another size than keys": {"head_size_v": 32},
}


@pytest.fixture(params=list(BACKENDS.values()), ids=list(BACKENDS))
def backend(request: pytest.FixtureRequest) -> Any:
    """(backend, the class of its layers' attention)"""
    return request.param


@pytest.fixture
def vllm_config() -> Iterator[VllmConfig]:
    """vLLM's configuration while layers are built."""
    config = VllmConfig(device_config=DeviceConfig("cpu"))
    with set_current_vllm_config(config):
        yield config


def layers(config: VllmConfig, backend: Any, **feature: Any) -> dict[str, Any]:
    """Three layers as a model builds them, the last one with a feature."""
    for index, given in enumerate(({}, {}, feature)):
        name = f"layers.{index}.attn"
        Attention(4, given.pop("size", 64), 0.1, 2, prefix=name, attn_backend=backend, **given)
    context = config.compilation_config.static_forward_context
    return {**context, "experts": torch.nn.Identity()}


def test_full_attention_is_served(vllm_config: VllmConfig, backend: Any) -> None:
    check_layers(layers(vllm_config, backend[0]), backend[1])


@pytest.mark.parametrize("feature", list(FEATURES))
def test_features_of_one_layer_are_named(
    vllm_config: VllmConfig, backend: Any, feature: str
) -> None:
    if backend[0] is PicFlashBackend and feature == "attention sinks":
        # vLLM imports what it asks about sinks on GPUs only.
        built = layers(vllm_config, backend[0])
        built["layers.2.attn"].impl.sinks = FEATURES[feature]["sinks"]
    else:
        built = layers(vllm_config, backend[0], **FEATURES[feature])
    named = rf"does not support {feature} \(1 of 3 layers\)"
    with pytest.raises(ConfigError, match=named) as error:
        check_layers(built, backend[1])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "feature"),
    [
        (lambda layer: setattr(layer.impl, "chunk_lookback", 1), "chunked attention"),
        (lambda layer: setattr(layer, "use_mm_prefix", True), "bidirectional prefixes"),
        (lambda layer: setattr(layer, "use_alibi_sqrt", True), "ALiBi"),
        (lambda layer: setattr(layer, "has_sink", True), "attention sinks"),
    ],
)
def test_what_layers_are_told_later_is_named(
    vllm_config: VllmConfig, backend: Any, change: Any, feature: str
) -> None:
    """By models, or by backends that no model here chooses."""
    built = layers(vllm_config, backend[0])
    change(built["layers.1.attn"])
    with pytest.raises(ConfigError, match=rf"does not support {feature} \(1 of 3 layers\)"):
        check_layers(built, backend[1])


class RecurrentLayer(AttentionLayerBase):
    """A layer of a hybrid model: its state is in the cache, but no keys."""

    def get_attn_backend(self) -> Any:
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> Any:
        raise NotImplementedError


def test_layers_of_another_kind_are_named(vllm_config: VllmConfig, backend: Any) -> None:
    built = layers(vllm_config, backend[0]) | {"layers.3.mixer": RecurrentLayer()}
    with pytest.raises(ConfigError, match=r"support RecurrentLayer layers \(1 of 4 layers\)"):
        check_layers(built, backend[1])


def test_a_model_without_attention_is_refused(backend: Any) -> None:
    with pytest.raises(ConfigError, match="0 shapes of attention heads"):
        check_layers({"experts": torch.nn.Identity()}, backend[1])


def test_layers_of_another_shape_are_refused(vllm_config: VllmConfig, backend: Any) -> None:
    with pytest.raises(ConfigError, match="2 shapes of attention heads"):
        check_layers(layers(vllm_config, backend[0], size=128), backend[1])


def test_layers_with_another_backend_are_refused(vllm_config: VllmConfig) -> None:
    with pytest.raises(ConfigError, match="attention by TritonAttentionImpl"):
        check_layers(layers(vllm_config, TritonAttentionBackend), SplitAttention)


def test_a_quantised_cache_is_refused(vllm_config: VllmConfig) -> None:
    cache = CacheConfig(cache_dtype="fp8")
    built = layers(vllm_config, PicAttentionBackend, cache_config=cache)
    with pytest.raises(ConfigError, match="a quantised KV cache"):
        check_layers(built, PicAttention)


def test_attention_never_quantises_its_output(
    vllm_config: VllmConfig, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM fuses quantisation into attention that says it can; picbench's kernels cannot."""
    built = layers(vllm_config, backend[0])
    for layer in list(built.values())[:3]:
        assert not layer.impl.fused_output_quant_supported(kFp8StaticTensorSym)
    monkeypatch.setattr(backend[1], "fused_output_quant_supported", lambda self, key: True)
    with pytest.raises(ConfigError, match="quantised output of attention"):
        check_layers(built, backend[1])


def test_upstream_quantises_outputs_where_picbench_does_not() -> None:
    supported = TritonAttentionImpl.fused_output_quant_supported
    assert TritonSplitAttention.fused_output_quant_supported is not supported


def test_gpt_oss_is_refused_at_start(tmp_path: Path) -> None:
    """By its layers, before any weights are needed: vLLM draws some."""
    config = GptOssConfig(
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=256,
        architectures=["GptOssForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"attention sinks \(2 of 2 layers\), a sliding window"):
        Engine(EngineConfig(str(tmp_path), dtype="bfloat16", kv_blocks=64, context=256, tiers=""))
