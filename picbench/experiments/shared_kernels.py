"""Random requests over chunks whose blocks they share."""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor

from picbench.experiments import shared_kernels as shared_cases
from picbench.experiments.kernel_cases import (
    STOCK_SPLITS,
    TOLERANCE,
    Scene,
    Slots,
    decode_errors,
    filled,
    interleave,
    paired,
    planned,
    require_right,
    rope_table,
    stock_arm,
)
from picbench.experiments.page import Spread, save, update_summary
from picbench.kernels.cuda.decode.attention import DecodeBatch, read_tiles
from picbench.kernels.cuda.decode.request_table import RequestTable
from picbench.kernels.cuda.decode.shared.group_rows import GroupRows
from picbench.kernels.cuda.decode.shared.key_cells import CELL_BLOCKS, KeyCell
from picbench.kernels.cuda.decode.shared.reader_groups import ReaderGroups
from picbench.kernels.cuda.decode.shared.shared_decode import GroupLaunch, SharedDecodeBatch
from picbench.kernels.cuda.decode.shared.shared_table import SharedRequestTable
from picbench.kernels.cuda.decode.shared.sharing_costs import (
    SharingCosts,
    block_gb,
    own_ms,
    products,
    shared_ms,
)
from picbench.kernels.cuda.prefill import flash
from picbench.kernels.cuda.visible_blocks import CanonicalBlocks
from picbench.kernels.paging import BLOCK_SIZE
from picbench.kernels.rope import RopeTable
from picbench.kernels.shape import HeadShape
from picbench.store import provenance
from picbench.tables import table as markdown


@dataclass(frozen=True, slots=True)
class ChunkReads:
    """A request's chunks, by number, and how many of its tokens follow them.

    The first `linked` tokens of each chunk are recomputed; chunks were compiled after `anchor`.
    """

    chunks: tuple[int, ...]
    text: int
    linked: int = 0
    anchor: int = 0


@dataclass(frozen=True, slots=True)
class SharedScene:
    """A scene, and the canonical blocks of each request."""

    scene: Scene
    canonical: tuple[CanonicalBlocks, ...]

    def put(self, table: SharedRequestTable, rows: Sequence[int]) -> None:
        """Write the requests to these rows of the table."""
        for row, slots, canonical in zip(rows, self.scene.requests, self.canonical, strict=True):
            table.put(row, slots.kpos, slots.rope_shift, canonical)


def draw_shared(
    lengths: Sequence[int],
    reads: Sequence[ChunkReads],
    shape: HeadShape,
    rope: RopeTable,
    *,
    device: torch.device | str,
    seed: int = 0,
    head_major: bool = False,
    poison: bool = False,
    unrotated: bool = False,
) -> SharedScene:
    """Requests over chunks of these lengths; blocks are scattered.

    Keys are random, so `unrotated` only says how they have to be read.
    """
    generator = torch.Generator(device).manual_seed(seed)
    requests = [_slots(lengths, read, unrotated=unrotated) for read in reads]
    shifts = [_slots(lengths, read, unrotated=False).rope_shift for read in reads]
    chunk_blocks = [-(-length // BLOCK_SIZE) for length in lengths]
    own = [-(-slots.computed // BLOCK_SIZE) for slots in requests]
    total = sum(chunk_blocks) + sum(own) + 1
    order = torch.randperm(total, generator=generator, device=device).int()
    *parts, _ = torch.split(order, [*chunk_blocks, *own, 1])
    chunks, private = parts[: len(lengths)], parts[len(lengths) :]
    table = torch.zeros(
        len(reads), max(slots.blocks for slots in requests), dtype=torch.int32, device=device
    )
    canonical = []
    for row, read, mine, shift in zip(table, reads, private, shifts, strict=True):
        found = [_kept(chunks[chunk], lengths[chunk], read.linked) for chunk in read.chunks]
        shared = torch.cat([*found, mine[:0]])
        row[: len(shared)] = shared
        row[len(shared) : len(shared) + len(mine)] = mine
        slots = len(shared) * BLOCK_SIZE
        canonical.append(CanonicalBlocks(shared.cpu().numpy(), shift[:slots].numpy()))
    scene = filled(requests, table, total, shape, rope, generator, head_major, poison)
    return SharedScene(scene, tuple(canonical))


def _slots(lengths: Sequence[int], read: ChunkReads, *, unrotated: bool) -> Slots:
    return planned(
        [lengths[chunk] for chunk in read.chunks],
        linked=read.linked,
        text=read.text,
        anchor=read.anchor,
        unrotated=unrotated,
    )


def _kept(blocks: Tensor, length: int, linked: int) -> Tensor:
    """A chunk's blocks without those that are linked as a whole."""
    return blocks[min(linked, length) // BLOCK_SIZE :]


#: Every cell with two readers is shared, whatever it costs.
FORCED = SharingCosts.always()


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


# Llama-3.1-8B's and Mistral-7B's.
SHAPE = HeadShape(32, 8, 128, torch.bfloat16)


def measure(
    output: Path, device: str, rounds: int, seed: int, only: Sequence[int], commit: str | None
) -> str:
    """Checks, then on a GPU times; the page. `only` some of the cases, by number.

    Raises InvalidRun where an output is wrong.
    """
    errors = dict(shared_cases.checks(device, seed))
    worst = "\n".join(f"{name}: {error:.1e}" for name, error in errors.items())
    if device == "cpu":
        return f"Relative errors against float64, interpreted:\n{worst}"
    click.echo(worst, err=True)
    document: dict[str, Any] = {
        "schema": 1,
        "provenance": provenance.facts(*provenance.GPU, device="cuda", commit=commit)
        | {"rounds": rounds, "seed": seed, "weights": "none: random queries, keys and values"},
        "checks": errors,
        "host": grouping_times(),
        "cases": [],
    }
    for number, case in enumerate(shared_cases.CASES):
        if only and number not in only:
            continue
        click.echo(f"{number}: {case.name}", err=True)
        document["cases"].append(time_case(case, rounds, seed))
        torch.cuda.empty_cache()
        save(output / "shared-decode", document, report(document))
    update_summary(output, {"shared_decode": _figures(document["cases"])})
    return report(document)


def time_case(case: SharedCase, rounds: int, seed: int) -> dict[str, Any]:
    """Checks and times one case."""
    drawn = case.scene(SHAPE, seed, "cuda", poison=False)
    query = drawn.scene.queries(case.requests, seed)
    out = torch.empty_like(query)
    arms, batch = shared_cases.arms(drawn, query, out)
    errors = shared_cases.check_arms(drawn, query, out, arms)
    samples = interleave(arms, rounds, seed)
    reads = batch.table.groups_of.reads
    return {
        "case": case.name,
        "sharing": case.sharing,
        "apart": case.apart,
        "errors": errors,
        "ms": {name: asdict(Spread.of(times)) for name, times in samples.items()},
        "own_over": {
            name: asdict(paired(samples["own"], times)) for name, times in samples.items()
        },
        "reads": asdict(reads),
        "read_gb": reads.loaded * block_gb(SHAPE),
        "tflop": products(reads, SHAPE),
        "estimate_ms": {
            "asked": own_ms(reads, SHAPE, SharingCosts()),
            "shared": shared_ms(reads, SHAPE, SharingCosts()),
        },
    }


def grouping_times(rows: int = 256, chosen: int = 64, chunks: int = 2048) -> dict[str, float]:
    """Milliseconds of the host, medians: requests that go and come, and steps without any.

    A request reads `chosen` chunks; `changes` collects what the device has to be told.
    """
    made = ReaderGroups(rows, 512, 8192, 16384, SHAPE, SharingCosts(), GroupRows.of(SHAPE.group))
    dice = random.Random(0)

    def cells() -> list[KeyCell]:
        return [_cell(dice.randrange(chunks), 512 * i) for i in range(chosen)]

    for row in range(rows):
        made.add(row, cells())
    made.take_changes()
    times: dict[str, list[float]] = {"goes": [], "comes": [], "changes": [], "idle": []}
    for _ in range(200):
        row, new = dice.randrange(rows), cells()
        steps: tuple[Callable[[], object], ...] = (
            partial(made.remove, row),
            partial(made.add, row, new),
            made.take_changes,
            made.take_changes,
        )
        for spent, step in zip(times.values(), steps, strict=True):
            began = time.perf_counter()
            step()
            spent.append(1e3 * (time.perf_counter() - began))
    return {name: statistics.median(spent) for name, spent in times.items()}


def _cell(chunk: int, shift: int) -> KeyCell:
    blocks = np.arange(CELL_BLOCKS) + CELL_BLOCKS * chunk
    contents = np.stack([blocks, np.full(CELL_BLOCKS, 0xFFFF), np.zeros(CELL_BLOCKS)])
    contents = contents.astype(np.int32)
    return KeyCell(contents.tobytes(), contents, 0, CELL_BLOCKS // 4, shift)


def _figures(cases: Sequence[dict[str, Any]]) -> dict[str, float]:
    found = {}
    for row in cases:
        if row["apart"]:
            found["unshared_vs_own"] = 1 / row["own_over"]["chosen"]["median"]
        elif row["case"] == shared_cases.CASES[0].name:
            found["layer_ms"] = row["ms"]["shared"]["median"]
            if "fa3" in row["ms"]:
                found["fa3_ms"] = row["ms"]["fa3"]["median"]
    return found


def _found_costs(cases: Sequence[dict[str, Any]]) -> str:
    """What to put into `SharingCosts`: the best rates of all cases."""

    def best(amount: str) -> float:
        return max((row[amount] / row["ms"]["of groups"]["median"] for row in cases), default=0.0)

    idle = [row["ms"]["of groups"]["best"] for row in cases if row["apart"]]
    return (
        f"shared_gb_ms >= {best('read_gb'):.2f}, tflop_ms >= {best('tflop'):.3f}, "
        f"launch_ms about {min(idle, default=float('nan')):.4f}"
    )


def report(document: dict[str, Any]) -> str:
    """The Markdown page."""
    run, cases, host = document["provenance"], document["cases"], document["host"]
    arms = ("fa3", "own", "chosen", *shared_cases.LAUNCHES, "of groups", "of tiles", "of merge")
    rows = [
        [
            row["case"],
            f"{row['sharing']:.1f}",
            *(f"{row['ms'][arm]['median']:.3f}" if arm in row["ms"] else "-" for arm in arms),
            f"{row['own_over']['chosen']['median']:.2f}",
            f"{row['estimate_ms']['asked']:.3f}",
            f"{row['estimate_ms']['shared']:.3f}",
            f"{row['errors']['shared']:.1e}",
        ]
        for row in cases
    ]
    last = ("own/chosen", "est. alone", "est. shared", "error")
    return (
        "# Decode that reads shared chunks once\n\n"
        f"{run['gpu']}, driver {run['driver']}, CUDA {run['cuda']}, torch {run['torch']}, Triton "
        f"{run['triton']}, vLLM {run['vllm']},\n32 heads, 8 KV heads, head size 128, bfloat16, "
        f"seed {run['seed']}, {run['rounds']} rounds, commit {run['commit']}.\nMilliseconds of a "
        "layer, medians of CUDA graphs replayed in random order. `own`: each request reads its\n"
        "blocks. `chosen`: what the cost model chooses. The next shared ones share wherever two "
        "requests can;\n`of ...` are parts of `shared`. `est.`: what the cost model expects of the "
        "shared cells.\n\n"
        f"Host, 256 requests of 64 chunks, ms: {host}\n\n"
        f"Costs found: {_found_costs(cases)}\n\n"
        f"{markdown.table(('case', 'sharing', *arms, *last), rows)}\n"
    )
