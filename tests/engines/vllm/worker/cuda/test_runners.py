"""What the GPU runners refuse when they have loaded a model; loading itself needs a GPU."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as GPUModelRunnerV1

from picbench.engines.vllm.worker.cpu.backend import PicAttentionBackend
from picbench.engines.vllm.worker.cuda import runner, runner_v1
from picbench.engines.vllm.worker.cuda.attention import RunnerAttention
from picbench.errors import ConfigError

HIDDEN = HEAD = 64


@pytest.mark.parametrize(
    ("module", "ours", "upstream"),
    [
        (runner, runner.PicModelRunner, GPUModelRunner),
        (runner_v1, runner_v1.PicModelRunnerV1, GPUModelRunnerV1),
    ],
    ids=["V2", "V1"],
)
def test_layers_are_checked_once_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, module: Any, ours: type, upstream: type
) -> None:
    """A model with one recurrent layer and no attention."""
    monkeypatch.setattr(module, "select_backend", lambda config: None)
    monkeypatch.setattr(upstream, "load_model", lambda self: None)
    loaded: Any = object.__new__(ours)
    loaded.vllm_config = None
    loaded.compilation_config = SimpleNamespace(static_forward_context={"mixer": nn.Identity()})
    with pytest.raises(ConfigError, match="0 shapes of attention heads"):
        loaded.load_model()


class ScalingBlock(nn.Module):
    """Scales each dimension of its keys after it has rotated them, as a norm's weights do."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary_emb = get_rope(HEAD, 256, True, {"rope_theta": 1e4}, dtype=torch.float32)
        self.attn = Attention(1, HEAD, 0.1, 1, prefix="0.attn", attn_backend=PicAttentionBackend)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        query, key = self.rotary_emb(positions, hidden_states.clone(), hidden_states.clone())
        out: Tensor = self.attn(query, key * torch.linspace(0.5, 1.5, HEAD), hidden_states)
        return out


@pytest.fixture
def model() -> Iterator[nn.Module]:
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        yield nn.ModuleList([ScalingBlock()])


@pytest.mark.parametrize("keys_without_rope", [False, True])
def test_keys_that_cannot_be_rerotated_are_refused(
    model: nn.Module, keys_without_rope: bool
) -> None:
    config = SimpleNamespace(
        additional_config={"pic": {"keys_without_rope": keys_without_rope, "tiers": ""}},
        model_config=SimpleNamespace(get_hidden_size=lambda: HIDDEN, dtype=torch.float32),
    )
    with pytest.raises(ConfigError, match="ScalingBlock changes keys or values"):
        RunnerAttention.of(config, model, torch.device("cpu"))
