"""Decode of requests that share chunks: what is compared, and what must be right before."""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from picbench.kernels.cuda.decode.attention import DecodeBatch, read_tiles
from picbench.kernels.cuda.decode.request_table import RequestTable
from picbench.kernels.cuda.decode.shared.group_launch import GroupLaunch
from picbench.kernels.cuda.decode.shared.group_rows import GroupRows
from picbench.kernels.cuda.decode.shared.shared_decode import SharedDecodeBatch
from picbench.kernels.cuda.decode.shared.shared_table import SharedRequestTable
from picbench.kernels.cuda.decode.shared.sharing_costs import SharingCosts
from picbench.kernels.cuda.prefill import flash
from picbench.kernels.shape import HeadShape
from picbench.measure.kernels.decode_cases import STOCK_SPLITS, stock_arm
from picbench.measure.kernels.right_first import TOLERANCE, decode_errors, require_right
from picbench.measure.kernels.scene import rope_table
from picbench.measure.kernels.shared_scene import ChunkReads, SharedScene, draw_shared

#: Every cell with two readers is shared, whatever it costs.
FORCED = SharingCosts.none()


@dataclass(frozen=True, slots=True)
class SharedCase:
    """`requests` requests, each of `chosen` of `chunks` chunks of `length` tokens, then `tail`.

    They are drawn at random; with `apart` no two requests have a chunk in common.
    """

    requests: int
    chosen: int
    chunks: int
    length: int
    tail: int
    apart: bool = False

    @property
    def name(self) -> str:
        """For tables."""
        draw = "apart" if self.apart else f"of {self.chunks}"
        return f"{self.requests} x {self.chosen} {draw} x {self.length} + {self.tail}"

    @property
    def sharing(self) -> float:
        """Requests that read a chunk, in the mean."""
        return 1.0 if self.apart else self.requests * self.chosen / self.chunks

    def reads(self, seed: int) -> list[ChunkReads]:
        """The chunks of each request."""
        dice = random.Random(seed)
        everything = range(self.chunks)
        chosen = (
            range(i * self.chosen, (i + 1) * self.chosen)
            if self.apart
            else dice.sample(everything, self.chosen)
            for i in range(self.requests)
        )
        return [ChunkReads(tuple(own), self.tail) for own in chosen]

    def scene(
        self, shape: HeadShape, seed: int, device: str, *, unrotated: bool = False, poison: bool
    ) -> SharedScene:
        """Random keys, values and choices."""
        context = self.chosen * self.length + self.tail
        return draw_shared(
            [self.length] * self.chunks,
            self.reads(seed),
            shape,
            rope_table(shape.head_size, context + 1, device),
            device=device,
            seed=seed,
            unrotated=unrotated,
            poison=poison,
        )


#: By how many requests share a chunk, and one in which none do.
CASES = (
    SharedCase(64, 64, 128, 512, 1104),
    SharedCase(64, 64, 512, 512, 1104),
    SharedCase(64, 64, 1024, 512, 1104),
    SharedCase(64, 64, 2048, 512, 1104),
    SharedCase(64, 64, 4096, 512, 1104),
    SharedCase(64, 64, 4096, 512, 1104, apart=True),
    SharedCase(16, 64, 128, 512, 1104),
    SharedCase(16, 64, 256, 512, 1104),
    SharedCase(256, 16, 64, 512, 336),
    SharedCase(256, 16, 256, 512, 336),
    SharedCase(256, 10, 256, 176, 300),
    SharedCase(8, 64, 64, 512, 1104),
    SharedCase(64, 20, 100, 512, 400),
)

#: The kernel of groups launched in other ways than by default.
LAUNCHES: Mapping[str, tuple[GroupLaunch, int]] = {
    "shared": (GroupLaunch(), 32),
    "in turn": (GroupLaunch(overlap=False), 32),
    "triton": (GroupLaunch(gluon=False), 32),
    "buffers5": (GroupLaunch(buffers=5), 32),
    "cells16": (GroupLaunch(), 16),
}


def shared_batch(
    drawn: SharedScene, launch: GroupLaunch, cells: int, costs: SharingCosts, *, bare: bool = False
) -> SharedDecodeBatch:
    """The batch under test, filled."""
    scene = drawn.scene
    requests, width = scene.table.shape
    table = SharedRequestTable(
        requests,
        width + 4,
        scene.table.device,
        scene.shape,
        unrotated=bare,
        costs=costs,
        layout=GroupRows.of(scene.shape.group, cells),
    )
    rows = range(requests)
    drawn.put(table, rows)
    batch = SharedDecodeBatch(table, requests, scene.shape, scene.rope, launch=launch)
    for held in (batch.partial, batch.lse, batch.parts, batch.part_lse):
        held.fill_(float("nan"))
    batch.fill(scene.table, torch.arange(requests).int().to(scene.table.device), scene.lengths)
    return batch


def own_batch(drawn: SharedScene) -> DecodeBatch:
    """The batch of split-KV decode, which reads a chunk for each request, filled."""
    scene = drawn.scene
    requests, width = scene.table.shape
    table = RequestTable(requests, width + 4, scene.table.device)
    for row, slots in enumerate(scene.requests):
        table.put(row, slots.kpos, slots.rope_shift)
    batch = DecodeBatch(table, requests, scene.shape, scene.rope)
    batch.fill(scene.table, torch.arange(requests).int().to(scene.table.device), scene.lengths)
    return batch


Arms = dict[str, Callable[[], object]]


def arms(drawn: SharedScene, query: Tensor, out: Tensor) -> tuple[Arms, SharedDecodeBatch]:
    """What is timed: whole layers, and (`of ...`) parts of ours; and our batch by default."""
    scene = drawn.scene
    cache, scale = scene.kv_cache, scene.scale
    found: Arms = {"own": partial(own_batch(drawn).attend, query, cache, scale, out)}
    if flash.covers(scene.shape):
        found["fa3"] = stock_arm(scene, query, out, STOCK_SPLITS)
    for name, (launch, cells) in LAUNCHES.items():
        batch = shared_batch(drawn, launch, cells, FORCED)
        found[name] = partial(batch.attend, query, cache, scale, out)
    chosen = shared_batch(drawn, GroupLaunch(), 32, SharingCosts())
    found["chosen"] = partial(chosen.attend, query, cache, scale, out)
    batch = shared_batch(drawn, GroupLaunch(), 32, FORCED)

    def groups() -> None:
        batch.read_groups(query, cache, scale)
        batch.counter.zero_()

    found["of groups"] = groups
    found["of tiles"] = partial(read_tiles, query, cache, batch, scale)
    found["of merge"] = partial(batch.merge, out)
    return found, batch


def check_arms(drawn: SharedScene, query: Tensor, out: Tensor, found: Arms) -> dict[str, float]:
    """The error of each arm against float64. Raises InvalidRun where one is too large.

    FlashAttention-3 has none: it knows no shifts, and reads the keys as they are.
    """
    return {
        name: check(name, drawn, query, out, arm)
        for name, arm in found.items()
        if name != "fa3" and not name.startswith("of ")
    }


def check(
    name: str, drawn: SharedScene, query: Tensor, out: Tensor, arm: Callable[[], object]
) -> float:
    """The largest error of three requests. Raises InvalidRun where it is too large."""
    scene = drawn.scene
    out.fill_(float("nan"))
    arm()
    errors = decode_errors(scene, query, out)
    return require_right(f"shared decode {name} of {scene.shape}", errors, scene.shape.dtype)


def checks(device: str, seed: int) -> Iterator[tuple[str, float]]:
    """Heads and types of many kinds on small scenes with poisoned caches: name and error.

    Off the GPU kernels are interpreted, and scenes are tiny.
    """
    small = device == "cpu"
    case = SharedCase(5, 2, 3, 40, 19) if small else SharedCase(70, 5, 9, 300, 130)
    shapes = [(4, 2, 32), (3, 3, 16)] if small else [(32, 8, 128), (16, 1, 128), (7, 7, 64)]
    types = [torch.float32, torch.float16] if small else list(TOLERANCE)
    for heads in shapes:
        for dtype in types:
            for bare in (False, True):
                shape = HeadShape(*heads, dtype)
                drawn = case.scene(shape, seed, device, unrotated=bare, poison=True)
                query = drawn.scene.queries(case.requests, seed)
                out = torch.empty_like(query)
                launch = GroupLaunch.of(shape, unrotated=bare)
                batch = shared_batch(drawn, launch, 8, FORCED, bare=bare)
                arm = partial(batch.attend, query, drawn.scene.kv_cache, drawn.scene.scale, out)
                name = f"{heads} {str(dtype)[6:]} {'without' if bare else 'with'} RoPE"
                yield name, check(name, drawn, query, out, arm)
