"""Temperatures reach every kernel by way of the rope table: kernels against PyTorch."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from picbench.engines.planning.pages import GAP
from picbench.engines.vllm.worker.cuda.dense import DensePlanner
from picbench.engines.vllm.worker.cuda.kernel_planner import KernelPlanner
from picbench.engines.vllm.worker.cuda.metadata import Planner
from picbench.engines.vllm.worker.cuda.planned_requests import PlannedRequests
from picbench.engines.vllm.worker.slot_map import SLOT_MAP, SlotMap
from picbench.kernels.cuda.decode.request_table import RequestTable
from picbench.kernels.cuda.decode.shared.shared_table import SharedRequestTable
from picbench.kernels.cuda.decode.shared.sharing_costs import SharingCosts
from picbench.kernels.cuda.workspace import CudaWorkspace
from picbench.kernels.rope import RopeTable, rotate
from picbench.kernels.shape import HeadShape

SHAPES = [HeadShape(4, 2, 32, torch.float32)]
if torch.cuda.is_available():
    SHAPES += [HeadShape(8, 2, size, torch.bfloat16) for size in (64, 128)]
#: Two blocks of a chunk that is compiled at 0, 5 hidden slots among them, then text before and
#: after it.
POSITIONS = [*range(6, 33), *[GAP] * 5, *range(6), *range(33, 43)]


@pytest.fixture(params=SHAPES, ids=str)
def shape(request: pytest.FixtureRequest) -> HeadShape:
    found: HeadShape = request.param
    return found


@pytest.fixture
def rope(device: str, shape: HeadShape) -> RopeTable:
    size = shape.head_size
    turns = torch.arange(1, size // 2 + 1, device=device)
    angles = torch.arange(64, device=device).unsqueeze(1) / turns
    table = RopeTable(torch.cat([angles.cos(), angles.sin()], dim=-1), size)
    return table.tempered((0.5, 2.0), size)


def attended(
    planner: Planner, rope: RopeTable, shape: HeadShape, table: RequestTable | None, step: Any
) -> Tensor:
    """What two requests with one chunk attend to, the first at temperature 0.5."""
    requests = PlannedRequests(2, table, rope=rope)
    positions = tuple((at, 1) for at in POSITIONS)
    for name, temperature in (("x", 0.5), ("y", 1.0)):
        slot_map = SlotMap(positions, ((0, 32), (GAP, 16)), 43, temperature=temperature)
        params = SimpleNamespace(extra_args={SLOT_MAP: slot_map}, max_tokens=8)
        requests.add(name, params, len(POSITIONS), blocks=(3, 4))
    batch = requests.batch(["x", "y"], *step)
    assert batch is not None
    device = rope.cos_sin_cache.device
    torch.manual_seed(0)
    tokens = sum(step[1])
    size, heads = shape.head_size, shape.num_heads
    sizes = (12, 2, 16, 2 * size), (tokens, heads, size)
    cache, query = (torch.randn(*each).to(device, shape.dtype) for each in sizes)
    out = torch.full_like(query, float("nan"))
    blocks = torch.tensor([[3, 4, 1, 2], [3, 4, 5, 6]], dtype=torch.int32, device=device)
    for call in planner.plan(batch, blocks).calls:
        call.attend(query, cache, size**-0.5, out)
    return out


@pytest.mark.parametrize("step", [([32, 32], [16, 16]), ([48, 48], [1, 1])], ids=["link", "decode"])
@pytest.mark.parametrize("shares", [False, True])
def test_kernels_divide_scores_of_canonical_keys(
    rope: RopeTable, shape: HeadShape, device: str, step: Any, shares: bool
) -> None:
    table = RequestTable(3, 8, device)
    if shares:
        table = SharedRequestTable(3, 8, device, shape, costs=SharingCosts.always())
    kernels = KernelPlanner(table, 2, rope, shape, CudaWorkspace(1 << 18, device))
    found = attended(kernels, rope, shape, table, step)
    expected = attended(DensePlanner(rope), rope, shape, None, step)
    exact = shape.dtype == torch.float32
    tolerance = {"atol": 2e-5, "rtol": 1e-4} if exact else {"atol": 3e-2, "rtol": 3e-2}
    torch.testing.assert_close(found, expected, **tolerance)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
@pytest.mark.parametrize("shift", [-63, -1, 0, 7, 63])
def test_rows_rotate_and_divide(rope: RopeTable, temperature: float, shift: int) -> None:
    device = rope.cos_sin_cache.device
    keys = torch.randn(1, 2, rope.rotary_dim, device=device)
    at = torch.tensor([shift], device=device)
    row = rope.row_of(temperature) + at
    assert row >= 64
    found = rotate(keys, rope.shift_rows(row), is_neox=True)
    expected = rotate(keys, rope.shift_rows(at), is_neox=True) / temperature
    torch.testing.assert_close(found, expected)
    assert rope.row_of(1.0) == 0
    assert rope.positions == 64
