"""Paged prefill against the float64 reference, over poisoned caches, on a Hopper GPU."""

import pytest
import torch
from paged_prefill_cases import expected, paged_prefill_of
from references import paged_reference

from picbench.experiments.scenes import (
    Scene,
    Slots,
    draw,
    plain,
    planned,
    relative_error,
    rope_table,
)
from picbench.kernels.cuda.device import runs_gluon
from picbench.kernels.paging import GAP
from picbench.kernels.shape import HeadShape

pytestmark = pytest.mark.skipif(not runs_gluon(), reason="the Gluon kernel needs a Hopper GPU")

SHAPES = [
    HeadShape(32, 8, 128, torch.bfloat16),
    HeadShape(16, 1, 128, torch.bfloat16),
    HeadShape(3, 3, 64, torch.bfloat16),
    HeadShape(7, 1, 64, torch.float16),
]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}

CASES = {
    "plain": [plain(90, 13)],
    "one": [plain(1, 1)],
    "long": [plain(9000, 256)],
    "chunks": [planned([500] * 12, linked=16, text=80)],
    "odd": [planned([33, 300, 7, 129], linked=4, text=1, anchor=50), plain(70, 33)],
    "tail": [planned([500] * 8, linked=0, text=100), planned([40], linked=40, text=9)],
}


def attended(scene: Scene, workspace_bytes: int = 64 << 20) -> tuple[torch.Tensor, torch.Tensor]:
    query = scene.queries(sum(slots.computed for slots in scene.requests))
    work = paged_prefill_of(scene, workspace_bytes)
    outputs = []
    # Layers after the first one repeat its launches.
    for kv_cache in (scene.kv_cache, torch.zeros_like(scene.kv_cache), scene.kv_cache.clone()):
        work.partial.fill_(float("nan"))
        work.lse.fill_(float("nan"))
        outputs.append(torch.full_like(query, float("nan")))
        work.attend(query, kv_cache, scene.scale, outputs[-1])
    assert torch.equal(outputs[0], outputs[2]) and not outputs[1].any()
    return query, outputs[2]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_computed_tokens(case: str, shape: HeadShape, head_major: bool) -> None:
    rope = rope_table(shape.head_size, 10_000, "cuda")
    scene = draw(CASES[case], shape, rope, device="cuda", head_major=head_major, poison=True)
    query, out = attended(scene)
    assert relative_error(out, expected(scene, query)) <= TOLERANCE[shape.dtype]


def test_no_splits_where_the_workspace_is_small() -> None:
    shape = HeadShape(32, 8, 128, torch.bfloat16)
    scene = draw(CASES["chunks"], shape, rope_table(128, 10_000, "cuda"), device="cuda")
    query, out = attended(scene, 1 << 10)
    assert relative_error(out, expected(scene, query)) <= 1e-2


def test_pads_get_zeros() -> None:
    kpos = torch.tensor([*range(300), *[GAP] * 40, *range(300, 310)], dtype=torch.int32)
    slots = Slots(kpos, torch.zeros_like(kpos), 50)
    shape = HeadShape(8, 2, 128, torch.bfloat16)
    scene = draw([slots], shape, rope_table(128, 400, "cuda"), device="cuda", poison=True)
    query, out = attended(scene)
    assert not out[:40].any()
    assert relative_error(out, expected(scene, query)) <= 1e-2


def test_outputs_equal_those_of_its_own_reference() -> None:
    shape = HeadShape(8, 2, 64, torch.float16)
    scene = draw(CASES["odd"], shape, rope_table(64, 1000, "cuda"), device="cuda", poison=True)
    query, out = attended(scene)
    work = paged_prefill_of(scene)
    assert relative_error(out, paged_reference(query, scene.kv_cache, work, scene.scale)) <= 2e-3
