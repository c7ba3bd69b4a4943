"""Link and prefill against the float64 reference, over poisoned caches."""

import pytest
import torch
from references import gather_reference
from shifted_keys import KINDS, Kind, attention_at, shifted_scene
from torch import Tensor

from picbench.errors import ConfigError
from picbench.experiments.scenes import (
    Scene,
    Slots,
    draw,
    plain,
    planned,
    relative_error,
    rope_table,
)
from picbench.kernels.cuda.prefill.gather_rotated import PAGE, gather, gather_pages
from picbench.kernels.cuda.prefill.link import LinkBatch, LinkRequest, link
from picbench.kernels.cuda.prefill.logical_order import LogicalOrder
from picbench.kernels.cuda.repeated_launch import RepeatedLaunch
from picbench.kernels.cuda.workspace import CudaWorkspace
from picbench.kernels.paging import BLOCK_SIZE, GAP
from picbench.kernels.shape import HeadShape

ON_GPU = torch.cuda.is_available()


def linked(
    scene: Scene,
    query: Tensor,
    workspace: CudaWorkspace,
    before: int = 0,
    *,
    copied: bool = False,
) -> Tensor:
    found, start = [], before
    for index, slots in enumerate(scene.requests):
        order = LogicalOrder.of(slots.kpos, slots.rope_shift)
        stop = start + slots.computed
        found.append(LinkRequest(index, start, stop, order, slots.kpos[-slots.computed :]))
        start = stop
    batch = LinkBatch.build(found, scene.table, scene.rope, scene.shape, workspace, copied=copied)
    # Layers after the first one repeat its launches.
    for kv_cache in (torch.zeros_like(scene.kv_cache), scene.kv_cache):
        workspace._buffer.fill_(255)
        out = torch.full_like(query, float("nan"))
        link(query, kv_cache, batch, scene.scale, out)
    return out


def worst(scene: Scene, query: Tensor, found: Tensor, before: int = 0) -> float:
    errors, start = [], before
    for index, slots in enumerate(scene.requests):
        stop = start + slots.computed
        qpos = slots.kpos[-slots.computed :]
        real = (qpos != GAP).to(query.device)
        expected = scene.expected(index, query[start:stop], qpos)
        errors.append(relative_error(found[start:stop][real], expected[real]))
        start = stop
    return max(errors)


def requests(unrotated: bool = False) -> list[Slots]:
    return [
        planned([40, 100, 16], linked=16, text=21, unrotated=unrotated),
        planned([33, 7], linked=4, text=1, anchor=50, unrotated=unrotated),
        planned([17, 90], linked=0, text=16, unrotated=unrotated),
    ]


@pytest.fixture(params=[False, True] if ON_GPU else [True], ids=lambda copied: f"copied={copied}")
def copied(request: pytest.FixtureRequest) -> bool:
    """Whether keys are copied where paged prefill costs less; on the CPU they always are."""
    return bool(request.param)


@pytest.mark.parametrize("unrotated", [False, True], ids=["rotated", "unrotated"])
def test_linked_requests(
    shape: HeadShape,
    device: str,
    head_major: bool,
    tolerance: float,
    unrotated: bool,
    copied: bool,
) -> None:
    rope = rope_table(shape.head_size, 300, device)
    scene = draw(
        requests(unrotated), shape, rope, device=device, head_major=head_major, poison=True
    )
    query = scene.queries(sum(slots.computed for slots in scene.requests))
    found = linked(scene, query, CudaWorkspace(16 << 20, device), copied=copied)
    assert worst(scene, query, found) <= tolerance


def test_prompts_without_a_plan_beside_planned_ones(
    shape: HeadShape, device: str, tolerance: float, copied: bool
) -> None:
    rope = rope_table(shape.head_size, 300, device)
    mixed = [plain(40, 40), *requests(), plain(200, 33)]
    scene = draw(mixed, shape, rope, device=device, poison=True)
    query = scene.queries(sum(slots.computed for slots in scene.requests))
    found = linked(scene, query, CudaWorkspace(16 << 20, device), copied=copied)
    assert worst(scene, query, found) <= tolerance


@KINDS
def test_keys_that_are_read_at_another_position(
    kind: Kind, device: str, dtype: torch.dtype, tolerance: float, copied: bool
) -> None:
    slots = planned([40, 30], linked=4, text=3, anchor=20)
    scene, key = shifted_scene(slots, kind, HeadShape(4, 2, 64, dtype), device)
    query, qpos = scene.queries(slots.computed), slots.kpos[-slots.computed :].to(device)
    found = linked(scene, query, CudaWorkspace(16 << 20, device), copied=copied)
    assert relative_error(found, attention_at(scene, key, query, qpos)) <= tolerance


def test_only_the_batch_is_written(
    device: str, dtype: torch.dtype, tolerance: float, copied: bool
) -> None:
    shape = HeadShape(4, 2, 64, dtype)
    scene = draw([plain(90, 13)], shape, rope_table(64, 300, device), device=device, poison=True)
    query = scene.queries(13 + 8)
    found = linked(scene, query, CudaWorkspace(16 << 20, device), before=5, copied=copied)
    assert worst(scene, query, found, before=5) <= tolerance
    assert bool(found[:5].isnan().all()) and bool(found[18:].isnan().all())


def test_heads_are_taken_in_passes_where_memory_is_scarce(
    device: str, dtype: torch.dtype, tolerance: float
) -> None:
    shape = HeadShape(8, 4, 64, dtype)
    rope = rope_table(64, 300, device)
    scene = draw([planned([150], linked=16, text=40)], shape, rope, device=device, poison=True)
    query = scene.queries(56)
    tight = CudaWorkspace(2 * 2 * PAGE * 2 * 64 * dtype.itemsize, device)
    assert tight.heads(2 * PAGE, 4, 64, dtype) == 2
    assert worst(scene, query, linked(scene, query, tight, copied=True)) <= tolerance


def test_a_workspace_that_cannot_hold_one_head_is_refused(device: str) -> None:
    shape = HeadShape(2, 1, 64, torch.float16)
    scene = draw([plain(300, 1)], shape, rope_table(64, 300, device), device=device)
    with pytest.raises(ConfigError, match="workspace"):
        linked(scene, scene.queries(1), CudaWorkspace(1 << 10, device), copied=True)


def test_padding_queries_are_finite(
    device: str, dtype: torch.dtype, tolerance: float, copied: bool
) -> None:
    shape = HeadShape(4, 2, 64, dtype)
    kpos = torch.tensor([*range(20), *[GAP] * 5, *range(20, 30)], dtype=torch.int32)
    slots = Slots(kpos, torch.zeros_like(kpos), 25)
    scene = draw([slots], shape, rope_table(64, 300, device), device=device, poison=True)
    query = scene.queries(25)
    found = linked(scene, query, CudaWorkspace(16 << 20, device), copied=copied)
    assert bool(found.isfinite().all())
    assert worst(scene, query, found) <= tolerance


def test_gather_equals_its_reference(device: str, dtype: torch.dtype) -> None:
    shape = HeadShape(4, 2, 64, dtype)
    rope = rope_table(64, 300, device)
    scene = draw([plain(300, 1)], shape, rope, device=device)
    slots = torch.full((2 * PAGE,), -1, dtype=torch.int64, device=device)
    slots[:200] = torch.randperm(300, device=device)[:200]
    rope_shift = torch.randint(-299, 300, (2 * PAGE,), device=device).int()
    key, value = torch.full((2, 2, PAGE, 2, 64), float("nan"), dtype=dtype, device=device)
    gather(RepeatedLaunch(gather_pages), scene.kv_cache, slots, rope_shift, rope, key, value)
    wanted = gather_reference(scene.kv_cache, slots[:200], rope_shift[:200], rope)
    for found, expected in zip((key, value), wanted, strict=True):
        flat = found.flatten(0, 1)
        assert relative_error(flat[:200], expected.double()) <= 1e-3
        assert torch.equal(flat[200:], torch.zeros_like(flat[200:]))


def test_keys_without_a_shift_are_copied_bit_for_bit(device: str, dtype: torch.dtype) -> None:
    shape = HeadShape(4, 2, 64, dtype)
    scene = draw([plain(128, 1)], shape, rope_table(64, 300, device), device=device)
    slots = torch.arange(128, device=device)
    key, value = torch.empty((2, 1, PAGE, 2, 64), dtype=dtype, device=device)
    gather(
        RepeatedLaunch(gather_pages),
        scene.kv_cache,
        slots,
        torch.zeros_like(slots).int(),
        scene.rope,
        key,
        value,
    )
    own = scene.kv_cache[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE]
    assert torch.equal(key[0], own[..., :64])
    assert torch.equal(value[0], own[..., 64:])
