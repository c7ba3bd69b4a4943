"""Decode over chunks against FlashAttention-3 over plain requests of the same context."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from picbench.kernels.cuda.decode.attention import DecodeBatch, decode
from picbench.kernels.cuda.decode.request_table import RequestTable
from picbench.kernels.cuda.layout import key_value
from picbench.kernels.cuda.prefill import flash
from picbench.kernels.paging import BLOCK_SIZE
from picbench.kernels.shape import HeadShape
from picbench.measure.kernels.per_chunk_flash import SegmentBatch, decode_segments, segments_of
from picbench.measure.kernels.right_first import decode_errors, require_right
from picbench.measure.kernels.scene import Scene, Slots, draw, planned, rope_table

#: Names in kernels.json: keys cached with RoPE or without, FlashAttention-3 once for each chunk.
WITH_ROPE, WITHOUT_ROPE, PER_CHUNK = "turned", "unrotated", "parts"

#: What vLLM 0.32 uses under CUDA graphs (flash_attn_max_num_splits_for_cuda_graph).
STOCK_SPLITS = 32

_SEGMENT_BLOCKS = 128


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """`requests` requests of `context` keys in chunks of about `chunk`, one query each."""

    requests: int
    context: int
    chunk: int
    shape: HeadShape

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that must be read."""
        slot = 2 * self.shape.num_kv_heads * self.shape.head_size * self.shape.dtype.itemsize
        return self.requests * self.context * slot


def cases(shape: HeadShape) -> Iterator[DecodeCase]:
    """The grid of the target, and its surroundings."""
    for requests in (16, 64, 256):
        for context in (8192, 16384, 32768):
            yield DecodeCase(requests, context, 500, shape)
    for requests, context in ((1, 32768), (1, 131072), (4, 32768)):
        yield DecodeCase(requests, context, 500, shape)
    yield DecodeCase(64, 32768, 150, shape)
    yield DecodeCase(64, 32768, 2000, shape)


def scene_of(case: DecodeCase, seed: int) -> Scene:
    """Requests whose chunks' first blocks were recomputed, as mepic lays them out."""
    count = max(1, (case.context - 64) // case.chunk)
    lengths = [case.chunk] * count
    slots = planned(lengths, linked=16, text=case.context - sum(lengths))
    rope = rope_table(case.shape.head_size, case.context + 1, "cuda")
    return draw([slots] * case.requests, case.shape, rope, device="cuda", seed=seed)


def stock_arm(scene: Scene, query: Tensor, out: Tensor, splits: int) -> Callable[[], Tensor]:
    """FlashAttention-3 as vLLM's backend calls it in decode, over the same cache."""
    requests = len(query)
    ends = [slots.end for slots in scene.requests]
    runs = flash.Runs(
        torch.arange(requests + 1, dtype=torch.int32, device="cuda"),
        torch.tensor(ends, dtype=torch.int32, device="cuda"),
        scene.table,
        1,
        max(ends),
    ).scheduled(scene.shape, BLOCK_SIZE, splits)
    key, value = key_value(scene.kv_cache)

    def run() -> Tensor:
        runs.attend(query, key, value, scene.scale, out, splits)
        return out

    return run


def own_arm(
    scene: Scene,
    query: Tensor,
    out: Tensor,
    unrotated: bool = False,
) -> Callable[[], Tensor]:
    """picbench's split-KV kernel."""
    table = RequestTable(len(query), scene.table.shape[1], "cuda", unrotated=unrotated)
    for row, slots in enumerate(scene.requests):
        table.put(row, slots.kpos, slots.kpos if unrotated else slots.rope_shift)
    batch = DecodeBatch(table, len(query), scene.shape, scene.rope)
    rows = torch.arange(len(query), dtype=torch.int32, device="cuda")
    batch.fill(scene.table, rows, scene.lengths)
    return lambda: decode(query, scene.kv_cache, batch, scene.scale, out)


def segments_arm(scene: Scene, query: Tensor, out: Tensor) -> Callable[[], Tensor]:
    """FlashAttention-3 over a sequence for each chunk, merged."""
    segments: dict[int, Any] = {}
    for slots in scene.requests:
        if id(slots) not in segments:
            segments[id(slots)] = segments_of(
                slots.kpos.numpy(), slots.rope_shift.numpy(), _SEGMENT_BLOCKS
            )
    own = [segments[id(slots)] for slots in scene.requests]
    batch = SegmentBatch.build(own, scene.table, scene.shape, scene.rope)
    return lambda: decode_segments(query, scene.kv_cache, batch, scene.scale, out)


def arms(case: DecodeCase, seed: int) -> dict[str, Callable[[], object]]:
    """The compared implementations; raises InvalidRun if one is wrong."""
    scene = scene_of(case, seed)
    query = scene.queries(case.requests, seed)
    out = torch.empty_like(query)
    found: dict[str, Callable[[], object]] = {
        WITH_ROPE: own_arm(scene, query, out),
        WITHOUT_ROPE: own_arm(scene, query, out, unrotated=True),
    }
    unrotated = _without_rope(scene)
    _check(WITH_ROPE, scene, query, own_arm(scene, query, out))
    _check(WITHOUT_ROPE, unrotated, query, own_arm(scene, query, out, unrotated=True))
    if flash.covers(case.shape):
        found[PER_CHUNK] = segments_arm(scene, query, out)
        _check(PER_CHUNK, scene, query, segments_arm(scene, query, out))
        found["fa3"] = stock_arm(scene, query, out, STOCK_SPLITS)
        found["fa3_auto"] = stock_arm(scene, query, out, 0)
    return found


def _without_rope(scene: Scene) -> Scene:
    made: dict[int, Slots] = {}
    for slots in scene.requests:
        made.setdefault(id(slots), Slots(slots.kpos, slots.kpos, slots.computed))
    requests = tuple(made[id(slots)] for slots in scene.requests)
    return Scene(scene.shape, scene.rope, requests, scene.table, scene.kv_cache)


def _check(name: str, scene: Scene, query: Tensor, arm: Callable[[], Tensor]) -> None:
    require_right(f"decode {name}", decode_errors(scene, query, arm()), scene.shape.dtype)
