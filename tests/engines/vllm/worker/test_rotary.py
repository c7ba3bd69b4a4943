"""The table that keys are re-rotated by, from vLLM's own rotary modules."""

from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.llama import LlamaAttention

from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.vllm.worker.cpu.backend import PicAttentionBackend
from picbench.engines.vllm.worker.key_check import check_keys
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


HIDDEN, HEAD, HEADS = 48, 64, 2
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


class Block(nn.Module):
    """Attention as vLLM's models have it, and what some do with keys."""

    def __init__(self, dtype: torch.dtype, is_neox: bool = True, **rope: Any) -> None:
        super().__init__()
        parameters = {"rope_theta": 10_000.0} | rope
        self.rotary_emb = get_rope(HEAD, 256, is_neox, parameters, dtype=dtype)
        self.attn = Attention(
            HEADS, HEAD, 0.1, HEADS, prefix="layers.0.attn", attn_backend=PicAttentionBackend
        )
        self.project = nn.Linear(HIDDEN, 3 * HEADS * HEAD, dtype=dtype)
        self.norm = RMSNorm(HEAD, dtype=dtype)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        query, key, value = self.project(hidden_states).chunk(3, dim=-1)
        query, key = self.rotary_emb(positions, query.contiguous(), key.contiguous())
        key, value = self.change(key, value, positions)
        out: Tensor = self.attn(query, key, value)
        return out

    def change(self, key: Tensor, value: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return key, value

    def normalised(self, key: Tensor) -> Tensor:
        normalised: Tensor = self.norm(key.view(-1, HEAD))
        return normalised.view_as(key)


class NormAfterRope(Block):
    def change(self, key: Tensor, value: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.normalised(key), value


class ScaledByPosition(Block):
    def change(self, key: Tensor, value: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return key * (1 + positions.unsqueeze(1) / 256), value


class PositionInValues(Block):
    def change(self, key: Tensor, value: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return key, value + positions.unsqueeze(1).to(value.dtype)


class RotatedTwice(Block):
    def change(self, key: Tensor, value: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.rotary_emb(positions, key.clone(), key)[1], value


class WithFurtherInput(Block):
    def forward(self, positions: Tensor, hidden_states: Tensor, scales: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(positions, hidden_states * scales)


def check(block: Block, dtype: torch.dtype = torch.float32) -> None:
    model = nn.ModuleList([block])
    check_keys(model, rope_table(model, exact=True), HIDDEN, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rope", [{}, YARN, {"partial_rotary_factor": 0.5}], ids=str)
@pytest.mark.parametrize("is_neox", [True, False])
def test_models_that_rotate_keys_last_are_served(
    dtype: torch.dtype, rope: dict[str, Any], is_neox: bool
) -> None:
    check(Block(dtype, is_neox, **rope), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_without_weights_commutes_with_rotations(dtype: torch.dtype) -> None:
    """As in Llama 4."""
    check(NormAfterRope(dtype), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_with_weights_after_the_rotation_is_refused(dtype: torch.dtype) -> None:
    block = NormAfterRope(dtype)
    block.norm.weight.data.uniform_(0.8, 1.2)
    with pytest.raises(ConfigError, match="NormAfterRope changes keys or values") as error:
        check(block, dtype)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", [ScaledByPosition, PositionInValues, RotatedTwice])
def test_other_traces_of_the_position_are_refused(kind: type[Block]) -> None:
    with pytest.raises(ConfigError, match=f"{kind.__name__} changes keys or values"):
        check(kind(torch.float32))


def test_blocks_that_take_more_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="computes keys from scales, too"):
        check(WithFurtherInput(torch.float32))


def test_such_a_model_is_refused_at_start(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = LlamaAttention.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        weight = torch.linspace(0.5, 1.5, self.kv_size)
        # Runs ahead of hooks that are added later, where a norm would be.
        self.attn.register_forward_pre_hook(lambda _, i: (i[0], i[1] * weight, i[2]))

    monkeypatch.setattr(LlamaAttention, "__init__", init)
    with pytest.raises(ConfigError, match="LlamaAttention changes keys or values"):
        Engine(EngineConfig(str(llama), dtype="float32", kv_blocks=64, context=256, tiers=""))
