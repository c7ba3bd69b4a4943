"""The table that keys are re-rotated by, from vLLM's own rotary modules."""

from collections.abc import Iterator
from copy import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.rotary_embedding import get_rope

from picbench.engines.vllm.worker.cpu.backend import PicAttentionBackend
from picbench.engines.vllm.worker.rotary import QueryRotary, replace_rotary, rope_table
from picbench.errors import ConfigError
from picbench.kernels.rope import rotate

POSITIONS = 256
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_ORIGINAL = {"original_max_position_embeddings": 64}

SERVED: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    # A context longer than the one that the model was trained with, which changes frequencies.
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "max_trained_positions": 64},
    "llama3": {"rope_type": "llama3", "factor": 8.0} | _LLAMA3 | _ORIGINAL,
    "yarn": {"rope_type": "yarn", "factor": 4.0} | _ORIGINAL,
    "yarn of its own factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.7}
    | _ORIGINAL,
    "partial yarn": {"rope_type": "yarn", "factor": 4.0, "partial_rotary_factor": 0.5} | _ORIGINAL,
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
}

# Longrope needs a whole model: it is a refused row of the table of architectures.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "by sections": ({"rope_type": "default", "mrope_section": [8, 12, 12]}, "MRotaryEmbedding"),
    "one table after the other": (
        {"rope_type": "linear", "factor": (1.0, 2.0)},
        "LinearScalingRotaryEmbedding is not supported: its angles are not positions",
    ),
}


class AttentionBlock(nn.Module):
    """What `rope_table` looks for in a model's layers."""

    def __init__(self, index: int, is_neox: bool, parameters: dict[str, Any]) -> None:
        super().__init__()
        self.rotary_emb = get_rope(64, POSITIONS, is_neox, parameters, dtype=torch.float32)
        self.attn = Attention(
            4, 64, 0.1, 2, prefix=f"layers.{index}.attn", attn_backend=PicAttentionBackend
        )


@pytest.fixture(autouse=True)
def vllm_config() -> Iterator[None]:
    """vLLM's configuration while layers are built."""
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        yield


def model_of(parameters: dict[str, Any], *, is_neox: bool = True) -> nn.Module:
    given = {"rope_theta": 10_000.0} | parameters
    return nn.ModuleList([AttentionBlock(index, is_neox, given) for index in range(2)])


def rotated(layer: Any, positions: Tensor, key: Tensor) -> Tensor:
    """The model's rotation of `key` [n, 2, 64] to `positions` [n]."""
    query = torch.zeros(len(key), 4 * 64)
    found: Tensor = layer.rotary_emb(positions, query, key.flatten(1).clone())[1]
    return found.view_as(key)


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("name", list(SERVED))
def test_a_key_that_is_shifted_is_the_models_key_at_the_other_position(
    name: str, is_neox: bool
) -> None:
    model = model_of(SERVED[name], is_neox=is_neox)
    rope = rope_table(model, exact=True)
    layer = next(model.children())
    before, key = torch.arange(100), torch.randn(100, 2, 64)
    after = before.flip(0) + 40
    shifts = rope.shift_rows(after - before)
    shifted = rotate(rotated(layer, before, key), shifts, is_neox=rope.is_neox)
    torch.testing.assert_close(shifted, rotated(layer, after, key), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", list(SERVED))
def test_a_key_without_rope_becomes_the_models_key(name: str) -> None:
    """It has the model's factor once, from `QueryRotary`, and its position from the table."""
    model = model_of(SERVED[name])
    layer = next(model.children())
    at, key = torch.arange(100), torch.randn(100, 2, 64)
    expected = rotated(layer, at, key)
    rope = replace_rotary(model, QueryRotary, exact=True)
    found = rotate(rotated(layer, at, key), rope.rows(at), is_neox=True)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_a_table_without_a_factor_is_the_models_own() -> None:
    model = model_of({})
    own: Any = next(model.children())
    assert torch.equal(rope_table(model).cos_sin_cache, own.rotary_emb.cos_sin_cache)


@pytest.mark.parametrize("name", list(REFUSED))
def test_other_rotary_embeddings_are_refused_by_name(name: str) -> None:
    parameters, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message) as error:
        rope_table(model_of(parameters), exact=True)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("way", ["forward_static", "forward_native", "forward_cuda", "forward_cpu"])
def test_a_way_to_rotate_that_its_table_does_not_tell_is_refused(way: str) -> None:
    model = model_of({})
    for layer in model.children():
        # vLLM gives the same module to all who ask for the same parameters.
        rotary: Any = copy(layer.rotary_emb)
        rotary.__class__ = type("Sideways", (type(rotary),), {way: lambda *_: None})
        layer.rotary_emb = rotary
    with pytest.raises(ConfigError, match="Sideways is not supported") as error:
        rope_table(model)
    assert "or a subclass with another table" in str(error.value)


def test_layers_with_other_tables_are_refused() -> None:
    layers = [*model_of({}).children()][:1]
    layers.append(AttentionBlock(7, True, {"rope_theta": 5_000.0}))
    with pytest.raises(ConfigError, match="different parameters"):
        rope_table(nn.ModuleList(layers))
