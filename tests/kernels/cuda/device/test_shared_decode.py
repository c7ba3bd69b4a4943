"""Decode that reads shared cells once, against the float64 reference, over poisoned buffers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from picbench.experiments.scenes import ChunkReads, Scene, draw, relative_error, rope_table
from picbench.kernels.cuda.decode.shared.group_rows import GroupRows
from picbench.kernels.cuda.decode.shared.shared_decode import GroupLaunch, SharedDecodeBatch
from picbench.kernels.cuda.decode.shared.shared_table import SharedRequestTable
from picbench.kernels.cuda.decode.shared.sharing_costs import SharingCosts
from picbench.kernels.rope import RopeTable
from picbench.kernels.shape import HeadShape

ON_GPU = torch.cuda.is_available()
UNTOUCHED = 7.0
#: Two readers are enough.
EAGER = SharingCosts.always()

#: A chunk that ends inside a block, one of several cells, one of a block, one of two blocks.
LENGTHS = [40, 150, 16, 23]
READS = [
    ChunkReads((0, 1, 2), 21),
    ChunkReads((1, 3, 0), 5),
    ChunkReads((1,), 70),
    # These see other slots of the first blocks than the others do, and other blocks.
    ChunkReads((2, 1, 0), 9, linked=4),
    ChunkReads((0, 1), 33, linked=16),
    ChunkReads((), 20),
    # A chunk twice, compiled after other tokens.
    ChunkReads((3, 1, 3), 1, anchor=30),
]


def shared_scene(
    lengths: Sequence[int],
    reads: Sequence[ChunkReads],
    shape: HeadShape,
    rope: RopeTable,
    *,
    unrotated: bool = False,
    **options: Any,
) -> Scene:
    """Requests that read chunks of these lengths."""
    requests = [read.slots(lengths, unrotated=unrotated) for read in reads]
    return draw(requests, shape, rope, chunks=lengths, **options)


def batch_of(
    scene: Scene, rows: Sequence[int], *, unrotated: bool = False, cells: int = 8
) -> SharedDecodeBatch:
    shape = scene.shape
    table = SharedRequestTable(
        max(rows) + 2,
        scene.table.shape[1] + 4,
        scene.table.device,
        shape,
        unrotated=unrotated,
        costs=EAGER,
        layout=GroupRows.of(shape.group, cells),
        parts_bytes=1 << 20,
    )
    scene.put(table, rows)
    launch = replace(GroupLaunch.of(shape, unrotated=unrotated), resident=2 if ON_GPU else 1)
    batch = SharedDecodeBatch(table, len(rows) + 1, shape, scene.rope, splits=2, launch=launch)
    if not ON_GPU:
        # The interpreter runs programs one after another, and the first one does all the work.
        batch.programs = 2
    for held in (batch.blocks, batch.seen):
        held.fill_(-1)
    for held in (batch.partial, batch.lse, batch.parts, batch.part_lse):
        held.fill_(float("nan"))
    return batch


def decoded(batch: SharedDecodeBatch, scene: Scene, rows: Tensor, query: Tensor) -> Tensor:
    batch.fill(scene.table, rows, scene.lengths)
    out = torch.full_like(query, UNTOUCHED)
    batch.attend(query, scene.kv_cache, scene.scale, out)
    assert int(batch.counter[0]) == 0
    return out


def worst(scene: Scene, query: Tensor, found: Tensor) -> float:
    last = torch.tensor([10_000], dtype=torch.int32)
    return max(
        relative_error(found[i : i + 1], scene.expected(i, query[i : i + 1], last))
        for i in range(len(scene.requests))
    )


def on(device: str, rows: Sequence[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=device)


def check(scene: Scene, device: str, tolerance: float, **options: Any) -> SharedDecodeBatch:
    """The outputs of all requests, in rows of another order."""
    count = len(scene.requests)
    rows = list(range(count, 0, -1))
    batch = batch_of(scene, rows, **options)
    query = scene.queries(count)
    assert worst(scene, query, decoded(batch, scene, on(device, rows), query)) <= tolerance
    assert int(batch.table.control[0]) == batch.table.groups_of.count > 0
    return batch


def test_shared_chunks(shape: HeadShape, device: str, head_major: bool, tolerance: float) -> None:
    rope = rope_table(shape.head_size, 400, device)
    scene = shared_scene(
        LENGTHS, READS, shape, rope, device=device, head_major=head_major, poison=True
    )
    batch = check(scene, device, tolerance)
    # Chunk 1, for one, is read at once for the three requests that see all of it.
    assert max(row[1] for row in batch.table.groups_of.group_rows()) >= 3


def test_unrotated_keys(shape: HeadShape, device: str, tolerance: float) -> None:
    rope = rope_table(shape.head_size, 400, device)
    scene = shared_scene(LENGTHS, READS, shape, rope, device=device, poison=True, unrotated=True)
    rotated = shared_scene(LENGTHS, READS, shape, rope, device=device)
    apart = check(scene, device, tolerance, unrotated=True).table.groups_of
    together = check(rotated, device, tolerance).table.groups_of
    # What is compiled after an anchor has a place of its own in its chunk.
    assert 0 < apart.count <= together.count


@pytest.mark.parametrize("unrotated", [False, True], ids=["rotated", "unrotated"])
@pytest.mark.parametrize(
    ("rotary_dim", "is_neox"), [(32, True), (64, False)], ids=["half", "GPT-J"]
)
def test_partial_and_interleaved_rotary(
    device: str,
    dtype: torch.dtype,
    tolerance: float,
    rotary_dim: int,
    is_neox: bool,
    unrotated: bool,
) -> None:
    rope = rope_table(rotary_dim, 400, device, is_neox=is_neox)
    scene = shared_scene(
        LENGTHS[:2],
        [ChunkReads((0, 1), 3), ChunkReads((1, 0), 9)],
        HeadShape(2, 1, 64, dtype),
        rope,
        device=device,
        poison=True,
        unrotated=unrotated,
    )
    check(scene, device, tolerance, unrotated=unrotated)


#: Query heads a KV head, and readers: rows that fit the smallest product, more than one product
#: has, and more than one row of groups has. The interpreter is slow.
SIZES = [(1, 2), (1, 17), (16, 2), (16, 5)]
SIZES += [(1, 150), (3, 9), (3, 50), (7, 23), (16, 19)] if ON_GPU else [(3, 43)]


@pytest.mark.parametrize(("group", "readers"), SIZES)
def test_groups_of_every_size(
    device: str, dtype: torch.dtype, tolerance: float, group: int, readers: int
) -> None:
    shape = HeadShape(group, 1, 128 if ON_GPU else 16, dtype)
    rope = rope_table(shape.head_size, 400, device)
    reads = [ChunkReads((0,), i % 16 + 1, anchor=i) for i in range(readers)]
    scene = shared_scene([70], reads, shape, rope, device=device, poison=True)
    batch = check(scene, device, tolerance, cells=4)
    assert sum(row[1] for row in batch.table.groups_of.group_rows()) == 2 * readers


def test_requests_come_and_go(device: str, dtype: torch.dtype, tolerance: float) -> None:
    shape = HeadShape(2, 1, 16 if not ON_GPU else 64, dtype)
    rope = rope_table(shape.head_size, 400, device)
    scene = shared_scene(LENGTHS, READS, shape, rope, device=device, poison=True)
    rows = list(range(len(READS)))
    batch = batch_of(scene, rows)
    query = scene.queries(len(READS))
    for gone in ([1, 6], [0, 2]):
        for row in gone:
            batch.table.clear(row)
        # Those that are left out are not read, and those that have gone are no longer known.
        lengths = scene.lengths
        lengths[gone] = 0
        lengths[5] = -1
        batch.fill_from_host(scene.table, np.array([rows, lengths.tolist()], np.int32))
        out = torch.full_like(query, UNTOUCHED)
        batch.attend(query, scene.kv_cache, scene.scale, out)
        for i in rows:
            if i in gone:
                assert torch.equal(out[i], torch.full_like(out[i], UNTOUCHED))
            elif i == 5:
                assert not out[i].any()
            else:
                last = torch.tensor([10_000], dtype=torch.int32)
                expected = scene.expected(i, query[i : i + 1], last)
                assert relative_error(out[i : i + 1], expected) <= tolerance
        scene.put(batch.table, rows)


def test_generated_tokens_follow(device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Groups stay as they are while requests generate."""
    shape = HeadShape(2, 1, 16 if not ON_GPU else 64, dtype)
    rope = rope_table(shape.head_size, 400, device)
    reads = [ChunkReads((0, 1), 30), ChunkReads((1, 0), 44)]
    scene = shared_scene(LENGTHS, reads, shape, rope, device=device, poison=True)
    batch = batch_of(scene, [0, 1])
    query = scene.queries(2)
    for fewer in (20, 0):
        lengths = (scene.lengths - fewer).tolist()
        batch.fill_from_host(scene.table, np.array([[0, 1], lengths], np.int32))
        out = batch.attend(query, scene.kv_cache, scene.scale, torch.empty_like(query))
        for i, slots in enumerate(scene.requests):
            last = torch.tensor([slots.end - 1 - fewer], dtype=torch.int32)
            expected = scene.expected(i, query[i : i + 1], last)
            assert relative_error(out[i : i + 1], expected) <= tolerance


def test_what_does_not_pay_is_read_alone(device: str, dtype: torch.dtype, tolerance: float) -> None:
    shape = HeadShape(2, 1, 16 if not ON_GPU else 64, dtype)
    rope = rope_table(shape.head_size, 400, device)
    scene = shared_scene(LENGTHS, READS, shape, rope, device=device, poison=True)
    rows = list(range(len(READS)))
    batch = batch_of(scene, rows)
    batch.table.groups_of.costs = SharingCosts(own_gb_ms=1e9)
    query = scene.queries(len(READS))
    found = decoded(batch, scene, on(device, rows), query)
    assert int(batch.table.control[0]) == 0
    assert worst(scene, query, found) <= tolerance


@pytest.mark.skipif(not ON_GPU, reason="graphs need a GPU")
@pytest.mark.parametrize("overlap", [False, True])
def test_a_graph_serves_groups_that_it_was_not_captured_with(
    shape: HeadShape, device: str, tolerance: float, overlap: bool
) -> None:
    rope = rope_table(shape.head_size, 400, device)
    scene = shared_scene(LENGTHS, READS, shape, rope, device=device, poison=True)
    rows = list(range(len(READS)))
    batch = batch_of(scene, rows)
    table = batch.table
    launch = replace(GroupLaunch.of(shape), overlap=overlap)
    batch = SharedDecodeBatch(table, len(rows), shape, rope, launch=launch)
    for row in rows:
        table.clear(row)
    query, on_device = scene.queries(len(rows)), on(device, rows)
    out = torch.empty_like(query)
    batch.fill(scene.table, on_device, torch.full_like(scene.lengths, -1))
    batch.attend(query, scene.kv_cache, scene.scale, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch.attend(query, scene.kv_cache, scene.scale, out)
    for gone in ([1], [0, 2], []):
        scene.put(table, rows)
        lengths = scene.lengths
        for row in gone:
            table.clear(row)
        lengths[gone] = -1
        batch.fill_from_host(scene.table, np.array([rows, lengths.tolist()], np.int32))
        out.fill_(float("nan"))
        batch.parts.fill_(float("nan"))
        graph.replay()
        for i in rows:
            if i in gone:
                assert not out[i].any()
            else:
                last = torch.tensor([10_000], dtype=torch.int32)
                expected = scene.expected(i, query[i : i + 1], last)
                assert relative_error(out[i : i + 1], expected) <= tolerance
