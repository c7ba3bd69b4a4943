"""FlashAttention-3 as the package calls it, where it runs, and what replaces it elsewhere."""

import numpy as np
import pytest
import torch
from references import merge_reference

from picbench.experiments.kernels import per_chunk_arm
from picbench.experiments.scenes import draw, plain, planned, relative_error, rope_table
from picbench.kernels.cuda.device import upload_all
from picbench.kernels.cuda.merge import merge
from picbench.kernels.cuda.prefill import flash, logical_order
from picbench.kernels.cuda.prefill.gather_rotated import PAGE
from picbench.kernels.cuda.prefill.query_tile import tokens_of
from picbench.kernels.cuda.prefill.tiled import TiledPrefill, schedule_tiles, tile_work
from picbench.kernels.shape import HeadShape


@pytest.fixture(params=[torch.float16, torch.bfloat16] if flash.available() else [torch.float16])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The types that FlashAttention serves."""
    kind: torch.dtype = request.param
    return kind


needs_flash = pytest.mark.skipif(not flash.available(), reason="FlashAttention-3 does not run here")


@needs_flash
@pytest.mark.parametrize("most", [2, 128])
def test_decode_by_segments(shape: HeadShape, tolerance: float, most: int) -> None:
    rope = rope_table(shape.head_size, 400, "cuda")
    requests = [
        planned([40, 100, 16], linked=16, text=21),
        planned([33, 7], linked=0, text=1, anchor=50),
        plain(70, 1),
    ]
    scene = draw(requests, shape, rope, device="cuda", poison=True)
    query = scene.queries(len(requests))
    out = torch.full_like(query, 7)
    per_chunk_arm(scene, query, out, most)()
    for i, slots in enumerate(requests):
        expected = scene.expected(i, query[i : i + 1], torch.tensor([slots.end]))
        assert relative_error(out[i : i + 1], expected) <= tolerance


@needs_flash
def test_tiles_equal_flash(shape: HeadShape, tolerance: float) -> None:
    seen = np.concatenate([np.arange(1, 17), np.arange(300, 317), np.arange(118, 251)])
    runs = logical_order.runs(seen.astype(np.int32))
    query = torch.randn(len(seen), shape.num_heads, shape.head_size, device="cuda").to(shape.dtype)
    size = (2, 3, PAGE, shape.num_kv_heads, shape.head_size)
    key, value = torch.randn(size, device="cuda").to(shape.dtype)
    starts, lengths = (torch.from_numpy(bounds).cuda() for bounds in runs)
    table = torch.arange(3, dtype=torch.int32, device="cuda").expand(len(lengths), -1)
    sequences = flash.Runs(starts, lengths, table.contiguous(), 133, 316)
    rows = tile_work(seen.astype(np.int32), 0, 0, tokens_of(shape.group))
    work = schedule_tiles(rows, seen.astype(np.int32), shape.num_kv_heads)
    there = upload_all(work.arrays, query.device)
    tiles = TiledPrefill.of(*there, work.splits, shape, shape.num_kv_heads)
    found, expected = torch.empty_like(query), torch.empty_like(query)
    tiles.attend(query, key, value, 0.1, found)
    sequences.attend(query, key, value, 0.1, expected)
    assert relative_error(found, expected.double()) <= tolerance


@pytest.mark.parametrize("splits", [1, 5, 40])
def test_merge_equals_its_reference(splits: int, device: str, dtype: torch.dtype) -> None:
    partial = torch.randn(splits + 3, 3, 64, device=device).to(dtype)
    lse = torch.randn(3, splits + 3, device=device) * 20
    lse[1, 2:] = float("-inf")
    partial[2:, 1] = float("nan")
    ints = {"dtype": torch.int32, "device": device}
    starts, counts = torch.tensor([2, 0], **ints), torch.tensor([splits, 0], **ints)
    out = torch.full((2, 3, 64), 7.0, device=device)
    merge[(2, 3)](
        partial, lse, starts, counts, out, 3 * 64, 1, splits + 3, 3 * 64, 64, 0, HEAD=64, TILE=16
    )
    wanted = merge_reference(partial[2 : 2 + splits].double(), lse.T[2 : 2 + splits].double())
    assert relative_error(out[0], wanted) <= 1e-5
    assert torch.equal(out[1], torch.full_like(out[1], 7.0))
