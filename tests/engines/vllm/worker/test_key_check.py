"""Keys that a model changes after it has rotated them are refused when the model is loaded."""

from collections.abc import Iterator
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
from picbench.engines.vllm.worker.rotary import rope_table
from picbench.errors import ConfigError

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


@pytest.fixture(autouse=True)
def vllm_config() -> Iterator[None]:
    """vLLM's configuration while layers are built."""
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        yield


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
