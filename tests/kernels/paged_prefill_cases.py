"""Paged prefill of random requests, for tests on the CPU and on the GPU."""

import numpy as np
import torch
from torch import Tensor

from picbench.experiments.scenes import Scene
from picbench.kernels.cuda.prefill.paged.key_tiles import KeyTiles
from picbench.kernels.cuda.prefill.paged.paged_prefill import PagedPrefill
from picbench.kernels.cuda.prefill.paged.tile_schedule import query_tiles
from picbench.kernels.cuda.prefill.query_tile import tokens_of
from picbench.kernels.cuda.workspace import CudaWorkspace
from picbench.kernels.paging import GAP
from picbench.kernels.slot_runs import SlotRuns


def tiles_of(kpos: Tensor, rope_shift: Tensor) -> KeyTiles:
    """Key tiles of slots whose blocks have one RoPE shift each."""
    tiles = KeyTiles.of(SlotRuns.of(kpos.numpy(), rope_shift.numpy()))
    assert tiles is not None
    return tiles


def paged_prefill_of(scene: Scene, workspace_bytes: int = 16 << 20) -> PagedPrefill:
    """All requests' computed tokens in one step."""
    found, keys, at, first, base = [], [], [], 0, 0
    for request in scene.requests:
        own = tiles_of(request.kpos, request.rope_shift)
        qpos = request.kpos[-request.computed :].numpy()
        found.extend(query_tiles(own, qpos, first, base, tokens_of(scene.shape.group)))
        keys.append(own)
        at.append(qpos)
        first, base = first + len(qpos), base + len(own.rope_shift)
    device = scene.table.device
    return PagedPrefill.of(
        found,
        keys,
        scene.table,
        range(len(scene.requests)),
        np.concatenate(at),
        scene.rope,
        scene.shape,
        CudaWorkspace(workspace_bytes, device),
    )


def expected(scene: Scene, query: Tensor) -> Tensor:
    """The float64 reference's outputs; zeros for pads."""
    outputs, start = [], 0
    for index, request in enumerate(scene.requests):
        qpos = request.kpos[-request.computed :]
        stop = start + request.computed
        found = scene.expected(index, query[start:stop], qpos)
        outputs.append(torch.where((qpos != GAP).to(query.device)[:, None, None], found, 0.0))
        start = stop
    return torch.cat(outputs)
