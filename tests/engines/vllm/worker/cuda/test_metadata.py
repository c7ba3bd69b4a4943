"""Steps split between vLLM's attention and picbench's, on CPU tensors."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as GPUModelRunnerV1

from picbench.engines.planning.pages import GAP
from picbench.engines.vllm.worker.cpu.backend import PicAttentionBackend
from picbench.engines.vllm.worker.cuda import planned_batch, runner, runner_v1
from picbench.engines.vllm.worker.cuda.attention import RunnerAttention
from picbench.engines.vllm.worker.cuda.backend import (
    PicFlashBackend,
    PicTritonBackend,
    SplitAttention,
    SplittingBuilder,
    choose_backend,
)
from picbench.engines.vllm.worker.cuda.dense import DensePlanner
from picbench.engines.vllm.worker.cuda.metadata import PlannedStep, SplitMetadata
from picbench.engines.vllm.worker.cuda.planned_requests import PlannedRequests
from picbench.errors import ConfigError
from picbench.kernels.cuda.reference import attend_reference
from picbench.kernels.rope import RopeTable

HEADS, KV_HEADS, SIZE = 4, 2, 32
POSITIONS = [*[GAP] * 3, *range(8, 21), *range(8), 21, 22, 23]
SHIFTS = [(0, 16, 5)]


class Stock:
    """Stands in for vLLM's builder and attention, neither of which runs on CPU."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Tensor:
        lengths: Tensor = common_attn_metadata.seq_lens
        return lengths

    scale = SIZE**-0.5

    def forward(self, *args: Any) -> Tensor:
        out: Tensor = args[-1]
        return out.fill_(7)


class Builder(SplittingBuilder, Stock):  # type: ignore[misc]
    def __init__(self) -> None:
        pass


class OneAttention(SplitAttention, Stock):  # type: ignore[misc]
    pass


@pytest.fixture
def rope() -> RopeTable:
    angles = torch.arange(64).unsqueeze(1) / 10_000 ** (torch.arange(SIZE // 2) / (SIZE // 2))
    return RopeTable(torch.cat([angles.cos(), angles.sin()], dim=-1), SIZE)


@pytest.fixture
def requests(send: Any) -> PlannedRequests:
    requests = PlannedRequests(4, None)
    requests.add("planned", send(POSITIONS, 24, SHIFTS), len(POSITIONS))
    return requests


def common(lengths: list[int], counts: list[int], table: Tensor) -> CommonAttentionMetadata:
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        num_reqs=len(lengths),
        num_actual_tokens=sum(counts),
        max_query_len=max(counts),
        max_seq_len=max(lengths),
        block_table_tensor=table,
        slot_mapping=torch.zeros(sum(counts), dtype=torch.int64),
    )


def build(
    requests: PlannedRequests, rope: RopeTable, names: list[str], computed: list[int]
) -> tuple[Any, CommonAttentionMetadata]:
    counts = [{"planned": 11, "decoding": 1}.get(name, 2) for name in names]
    batch = requests.batch(names, computed, counts)
    builder = Builder()
    builder.step = batch and PlannedStep(batch, DensePlanner(rope))
    table = torch.randperm(3 * len(names)).view(len(names), 3).int()
    lengths = [done + count for done, count in zip(computed, counts, strict=True)]
    step = common(lengths, counts, table)
    return builder.build(0, step), step


def test_plain_steps_are_vllms_own(requests: PlannedRequests, rope: RopeTable) -> None:
    metadata, step = build(requests, rope, ["a", "b"], [5, 0])
    assert metadata is step.seq_lens


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps whose plain prompts read more than few keys."""
    monkeypatch.setattr(planned_batch, "_FEW_READS", 1)


@pytest.mark.usefixtures("many")
def test_planned_requests_have_no_keys_in_vllms_attention(
    requests: PlannedRequests, rope: RopeTable
) -> None:
    metadata, step = build(requests, rope, ["a", "planned", "b"], [5, 16, 0])
    assert metadata.stock.tolist() == [7, 0, 2]
    assert step.seq_lens.tolist() == [7, 27, 2]


@pytest.mark.parametrize("names", [["planned"], ["decoding", "planned"], ["a", "planned", "b"]])
def test_vllms_attention_is_not_run_for_few_tokens(
    requests: PlannedRequests, rope: RopeTable, names: list[str]
) -> None:
    metadata, step = build(requests, rope, names, [16] * len(names))
    assert metadata.stock is None
    query = torch.randn(step.num_actual_tokens, HEADS, SIZE)
    out = torch.full_like(query, torch.nan)
    metadata.planned.attend(query, torch.randn(9, KV_HEADS, 16, 2 * SIZE), 1.0, out)
    assert bool(out.isfinite().all())


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("names", [["planned"], ["a", "planned", "b"]])
def test_either_attention_fills_its_own_rows(
    requests: PlannedRequests, rope: RopeTable, names: list[str]
) -> None:
    torch.manual_seed(0)
    computed = [16 if name == "planned" else 5 for name in names]
    metadata, step = build(requests, rope, names, computed)
    assert isinstance(metadata, SplitMetadata)
    cache = torch.randn(9, KV_HEADS, 16, 2 * SIZE)
    query = torch.randn(step.num_actual_tokens, HEADS, SIZE)
    out = torch.full_like(query, torch.nan)
    OneAttention().forward(None, query, query, query, cache, metadata, out)

    at = names.index("planned")
    first = int(step.query_start_loc[at])
    mine = slice(first, first + 11)
    expected = attend_reference(
        query[mine],
        cache,
        step.block_table_tensor[at],
        torch.tensor(POSITIONS, dtype=torch.int32),
        torch.tensor([5] * 16 + [0] * 11, dtype=torch.int32),
        torch.tensor(POSITIONS[16:], dtype=torch.int32),
        rope,
        SIZE**-0.5,
    )
    torch.testing.assert_close(out[mine].double(), expected, atol=1e-5, rtol=1e-4)
    others = torch.cat([out[: mine.start], out[mine.stop :]])
    assert bool((others == 7).all())


def test_negative_rope_shifts(send: Any, rope: RopeTable) -> None:
    """A chunk compiled after an anchor may begin before the position that it was compiled at."""
    requests = PlannedRequests(1, None)
    requests.add("planned", send([*range(16), 16], 17, [(0, 16, -4)]), 17)
    batch = requests.batch(["planned"], [16], [1])
    assert batch is not None
    cache, query = torch.randn(2, KV_HEADS, 16, 2 * SIZE), torch.randn(1, HEADS, SIZE)
    table = torch.tensor([[1, 0]], dtype=torch.int32)
    out = torch.empty_like(query)
    DensePlanner(rope).plan(batch, table).attend(query, cache, 1.0, out)
    kpos = torch.arange(17, dtype=torch.int32)
    shifts = torch.tensor([-4] * 16 + [0], dtype=torch.int32)
    expected = attend_reference(query, cache, table[0], kpos, shifts, kpos[16:], rope, 1.0)
    torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_attention_where_it_serves(dtype: torch.dtype) -> None:
    assert choose_backend(dtype, 128, flash=True) is PicFlashBackend


@pytest.mark.parametrize(
    ("dtype", "head_size", "flash"),
    [(torch.float32, 128, True), (torch.bfloat16, 128, False), (torch.bfloat16, 100, True)],
)
def test_triton_elsewhere(dtype: torch.dtype, head_size: int, flash: bool) -> None:
    assert choose_backend(dtype, head_size, flash=flash) is PicTritonBackend


def test_types_and_sizes_that_nothing_serves_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no attention serves torch\.float64"):
        choose_backend(torch.float64, 128, flash=True)
    with pytest.raises(ConfigError, match="no attention serves head size 8"):
        choose_backend(torch.float32, 8, flash=False)


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
