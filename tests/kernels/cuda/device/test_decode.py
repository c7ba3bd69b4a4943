"""Decode against the float64 reference, over poisoned caches."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from shifted_keys import KINDS, Kind, attention_at, shifted_scene
from torch import Tensor

from picbench.experiments.scenes import (
    Scene,
    Slots,
    draw,
    plain,
    planned,
    relative_error,
    rope_table,
)
from picbench.kernels.cuda.decode.attention import DecodeBatch, decode
from picbench.kernels.cuda.decode.request_table import RequestTable
from picbench.kernels.cuda.device import runs_gluon
from picbench.kernels.shape import HeadShape

UNTOUCHED = 7.0


def decoded(
    scene: Scene,
    query: Tensor,
    *,
    unrotated: bool = False,
    splits: int = 3,
    skip: int = -1,
    padding: int = 0,
    gluon: bool = True,
) -> Tensor:
    device = scene.table.device
    count = len(scene.requests)
    table = RequestTable(count + 2, scene.table.shape[1] + 4, device, unrotated=unrotated)
    rows = torch.arange(count, dtype=torch.int32, device=device).flip(0) + 1
    for row, slots in zip(rows.tolist(), scene.requests, strict=True):
        table.put(row, slots.kpos, slots.rope_shift)
    lengths = scene.lengths
    if skip >= 0:
        lengths[skip] = 0
    lengths[count - padding :] = -1
    batch = DecodeBatch(table, count + 1, scene.shape, scene.rope, gluon=gluon, splits=splits)
    for held in (batch.blocks, batch.seen):
        held.fill_(-1)
    batch.partial.fill_(float("nan"))
    batch.lse.fill_(float("nan"))
    batch.fill(scene.table, rows, lengths)
    # Layers after the first one repeat its launches.
    decode(query, torch.zeros_like(scene.kv_cache), batch, scene.scale, torch.empty_like(query))
    out = torch.full_like(query, float("nan") if padding else UNTOUCHED)
    return decode(query, scene.kv_cache, batch, scene.scale, out)


def on_host(rows: Tensor, lengths: Tensor) -> NDArray[np.int32]:
    """What a step's host knows of its requests."""
    return torch.stack([rows, lengths]).int().cpu().numpy()


def worst(scene: Scene, query: Tensor, found: Tensor) -> float:
    last = torch.tensor([10_000], dtype=torch.int32)
    errors = []
    for i in range(len(scene.requests)):
        expected = scene.expected(i, query[i : i + 1], last)
        errors.append(relative_error(found[i : i + 1], expected))
    return max(errors)


def requests(unrotated: bool = False) -> list[Slots]:
    return [
        planned([40, 100, 16], linked=16, text=21, unrotated=unrotated),
        planned([33, 7], linked=4, text=1, anchor=50, unrotated=unrotated),
        planned([17, 90], linked=0, text=16, unrotated=unrotated),
        planned([], linked=0, text=70, unrotated=unrotated),
        planned([1, 1, 1], linked=0, text=1, anchor=3, unrotated=unrotated),
    ]


@pytest.mark.parametrize("splits", [1, 3, 40])
def test_planned_requests(
    shape: HeadShape, device: str, head_major: bool, tolerance: float, splits: int
) -> None:
    rope = rope_table(shape.head_size, 300, device)
    scene = draw(requests(), shape, rope, device=device, head_major=head_major, poison=True)
    query = scene.queries(5)
    assert worst(scene, query, decoded(scene, query, splits=splits)) <= tolerance


@pytest.mark.skipif(not runs_gluon(), reason="Triton's kernel serves all other tests here")
def test_without_gluon(shape: HeadShape, device: str, head_major: bool, tolerance: float) -> None:
    rope = rope_table(shape.head_size, 300, device)
    scene = draw(requests(), shape, rope, device=device, head_major=head_major, poison=True)
    query = scene.queries(5)
    assert worst(scene, query, decoded(scene, query, gluon=False)) <= tolerance


@pytest.mark.skipif(not runs_gluon(), reason="the Gluon kernel needs a Hopper GPU")
@pytest.mark.parametrize("heads", [(12, 1, 64), (16, 1, 128)], ids=str)
def test_long_groups_of_heads(heads: tuple[int, int, int]) -> None:
    shape = HeadShape(*heads, torch.bfloat16)
    rope = rope_table(shape.head_size, 300, "cuda")
    scene = draw(requests(), shape, rope, device="cuda", poison=True)
    query = scene.queries(5)
    assert worst(scene, query, decoded(scene, query)) <= 1e-2


def test_unrotated_keys(shape: HeadShape, device: str, tolerance: float) -> None:
    rope = rope_table(shape.head_size, 300, device)
    scene = draw(requests(unrotated=True), shape, rope, device=device, poison=True)
    query = scene.queries(5)
    assert worst(scene, query, decoded(scene, query, unrotated=True)) <= tolerance


@pytest.mark.parametrize("unrotated", [False, True], ids=["rotated", "unrotated"])
@pytest.mark.parametrize(
    ("rotary_dim", "is_neox"), [(32, True), (64, False), (24, False)], ids=["half", "GPT-J", "GLM"]
)
def test_partial_and_interleaved_rotary(
    device: str,
    dtype: torch.dtype,
    tolerance: float,
    rotary_dim: int,
    is_neox: bool,
    unrotated: bool,
) -> None:
    rope = rope_table(rotary_dim, 300, device, is_neox=is_neox)
    shape = HeadShape(4, 2, 64, dtype)
    scene = draw(requests(unrotated), shape, rope, device=device, poison=True)
    query = scene.queries(5)
    assert worst(scene, query, decoded(scene, query, unrotated=unrotated)) <= tolerance


@KINDS
def test_keys_that_are_read_at_another_position(
    kind: Kind, device: str, dtype: torch.dtype, tolerance: float
) -> None:
    slots = planned([40, 60], linked=16, text=5, anchor=20)
    scene, key = shifted_scene(slots, kind, HeadShape(4, 2, 64, dtype), device)
    query = scene.queries(1)
    expected = attention_at(scene, key, query, torch.tensor([slots.end], device=device))
    assert relative_error(decoded(scene, query), expected) <= tolerance


def test_requests_left_out_are_not_touched(device: str, dtype: torch.dtype) -> None:
    shape = HeadShape(4, 2, 64, dtype)
    scene = draw(requests(), shape, rope_table(64, 300, device), device=device, poison=True)
    found = decoded(scene, scene.queries(5), skip=2)
    assert torch.equal(found[2], torch.full_like(found[2], UNTOUCHED))
    assert bool(found.isfinite().all())


def test_outputs_of_padding_are_zeros(
    shape: HeadShape, device: str, head_major: bool, tolerance: float
) -> None:
    """A graph is replayed with more requests than there are, over outputs of an older step."""
    rope = rope_table(shape.head_size, 300, device)
    scene = draw(requests(), shape, rope, device=device, head_major=head_major, poison=True)
    query = scene.queries(5)
    query[3:] = float("nan")
    for splits in (1, 3):
        found = decoded(scene, query, splits=splits, padding=2)
        assert not found[3:].any()
        assert worst(replace(scene, requests=scene.requests[:3]), query, found) <= tolerance


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need a GPU")
def test_a_graph_that_is_replayed_with_padding_leaves_nothing_of_older_steps(
    shape: HeadShape, device: str, tolerance: float
) -> None:
    rope = rope_table(shape.head_size, 300, device)
    scene = draw(requests(), shape, rope, device=device, poison=True)
    query = scene.queries(5)
    table = RequestTable(5, scene.table.shape[1] + 4, device)
    for row, slots in enumerate(scene.requests):
        table.put(row, slots.kpos, slots.rope_shift)
    batch = DecodeBatch(table, 5, shape, rope)
    rows, lengths, out = torch.arange(5, device=device).int(), scene.lengths, query.clone()
    batch.fill(scene.table, rows, lengths)
    decode(query, scene.kv_cache, batch, scene.scale, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode(query, scene.kv_cache, batch, scene.scale, out)
    for padding in (0, 2, 4):
        kept = 5 - padding
        out.fill_(float("nan"))
        lengths[kept:] = -1
        batch.fill_from_host(scene.table, on_host(rows, lengths))
        graph.replay()
        assert not out[kept:].any()
        assert worst(replace(scene, requests=scene.requests[:kept]), query, out) <= tolerance


def test_generated_tokens_need_no_new_row(
    device: str, dtype: torch.dtype, tolerance: float
) -> None:
    shape = HeadShape(4, 2, 64, dtype)
    rope = rope_table(64, 300, device)
    prompt = planned([40, 30], linked=16, text=5)
    more = torch.arange(75, 75 + 100, dtype=torch.int32)
    grown = Slots(
        torch.cat([prompt.kpos, more]), torch.cat([prompt.rope_shift, torch.zeros_like(more)]), 1
    )
    scene = draw([grown], shape, rope, device=device, poison=True)
    short = Scene(shape, rope, (prompt,), scene.table, scene.kv_cache)
    table = RequestTable(1, scene.table.shape[1], device)
    table.put(0, prompt.kpos, prompt.rope_shift)
    batch = DecodeBatch(table, 1, shape, rope, splits=2)
    row = torch.zeros(1, dtype=torch.int32, device=device)
    for now in (short, scene):
        batch.fill_from_host(scene.table, on_host(row, now.lengths))
        query = now.queries(1)
        out = torch.full_like(query, float("nan"))
        decode(query, scene.kv_cache, batch, scene.scale, out)
        assert worst(now, query, out) <= tolerance


def test_a_row_is_written_anew(device: str, dtype: torch.dtype, tolerance: float) -> None:
    shape = HeadShape(4, 2, 64, dtype)
    scene = draw([plain(50, 1)], shape, rope_table(64, 300, device), device=device, poison=True)
    table = RequestTable(1, 16, device)
    old = planned([60, 60, 60], linked=16, text=3)
    table.put(0, old.kpos, old.rope_shift)
    table.put(0, scene.requests[0].kpos, scene.requests[0].rope_shift)
    batch = DecodeBatch(table, 1, shape, scene.rope)
    batch.fill(scene.table, torch.zeros(1, dtype=torch.int32, device=device), scene.lengths)
    query = scene.queries(1)
    out = decode(query, scene.kv_cache, batch, scene.scale, torch.empty_like(query))
    assert worst(scene, query, out) <= tolerance
