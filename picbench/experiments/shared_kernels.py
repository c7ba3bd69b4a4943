"""Decode that reads shared chunks once, checked and timed beside that of single requests."""

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product

import click
import numpy as np
import torch

from picbench.engines.vllm.device import CUDA, find
from picbench.experiments import kernels, scenes
from picbench.experiments.kernels import SHAPE, Attend, Row
from picbench.experiments.scenes import ChunkReads, Scene, check
from picbench.kernels.cuda.decode.attention import read_tiles
from picbench.kernels.cuda.decode.shared import sharing_costs
from picbench.kernels.cuda.decode.shared.group_rows import GroupRows
from picbench.kernels.cuda.decode.shared.key_cells import CELL_BLOCKS, KeyCell
from picbench.kernels.cuda.decode.shared.reader_groups import ReaderGroups
from picbench.kernels.cuda.decode.shared.shared_decode import GroupLaunch, SharedDecodeBatch
from picbench.kernels.cuda.decode.shared.shared_table import SharedRequestTable
from picbench.kernels.cuda.decode.shared.sharing_costs import SharingCosts
from picbench.kernels.cuda.prefill import flash
from picbench.kernels.shape import HeadShape
from picbench.run.measurements import DecodeShared, Outcome
from picbench.tables.page import page, update_summary
from picbench.tables.table import NOTHING, table

#: The kernel of groups launched in other ways than by default, and blocks of its cells.
LAUNCHES: Mapping[str, tuple[GroupLaunch, int]] = {
    "shared": (GroupLaunch(), 32),
    "in turn": (GroupLaunch(overlap=False), 32),
    "triton": (GroupLaunch(gluon=False), 32),
    "buffers5": (GroupLaunch(buffers=5), 32),
    "cells16": (GroupLaunch(), 16),
}


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
        drawn = "apart" if self.apart else f"of {self.chunks}"
        return f"{self.requests} x {self.chosen} {drawn} x {self.length} + {self.tail}"

    def reads(self, seed: int) -> list[ChunkReads]:
        """The chunks of each request."""
        dice, own, rows = random.Random(seed), self.chosen, range(self.requests)
        if self.apart:
            return [ChunkReads(tuple(range(i * own, (i + 1) * own)), self.tail) for i in rows]
        return [ChunkReads(tuple(dice.sample(range(self.chunks), own)), self.tail) for _ in rows]

    def scene(
        self, shape: HeadShape, seed: int, device: str, *, unrotated: bool = False, poison: bool
    ) -> Scene:
        """Random keys, values and choices."""
        lengths = [self.length] * self.chunks
        requests = [read.slots(lengths, unrotated=unrotated) for read in self.reads(seed)]
        positions = self.chosen * self.length + self.tail + 1
        rope = scenes.rope_table(shape.head_size, positions, device)
        return scenes.draw(
            requests, shape, rope, device=device, seed=seed, chunks=lengths, poison=poison
        )

    def measure(self, rounds: int, seed: int) -> Row:
        """Check all arms but FlashAttention-3, which knows no shifts, then time them on a GPU.

        Raises InvalidRun where an error is too large.
        """
        scene = self.scene(SHAPE, seed, "cuda", poison=False)
        query = scene.queries(self.requests, seed)
        out = torch.empty_like(query)
        given = (query, scene.kv_cache, scene.scale)
        arms: dict[str, Attend] = {"own": partial(kernels.own_batch(scene).attend, *given, out)}
        if flash.covers(scene.shape):
            arms["fa3"] = kernels.stock_arm(scene, query, out, 1, kernels.STOCK_SPLITS)
        for name, (launch, cells) in LAUNCHES.items():
            arms[name] = partial(shared_batch(scene, launch, cells).attend, *given, out)
        chosen = shared_batch(scene, GroupLaunch(), 32, SharingCosts())
        arms["chosen"] = partial(chosen.attend, *given, out)
        errors = {
            name: check(f"shared decode {name} of {SHAPE}", scene, query, out, arm)
            for name, arm in arms.items()
            if name != "fa3"
        }
        batch = shared_batch(scene, GroupLaunch(), 32)

        def groups() -> None:
            batch.read_groups(*given)
            batch.counter.zero_()

        arms["of groups"] = groups
        arms["of tiles"] = partial(read_tiles, query, scene.kv_cache, batch, scene.scale)
        arms["of merge"] = partial(batch.merge, out)
        samples = kernels.replayed(arms, rounds, seed)
        own, reads, costs = samples["own"], batch.table.groups_of.reads, SharingCosts()
        return {
            "sharing": 1.0 if self.apart else self.requests * self.chosen / self.chunks,
            "apart": self.apart,
            "errors": errors,
            "ms": kernels.spreads(samples),
            "own_over": {name: kernels.paired(own, times) for name, times in samples.items()},
            "reads": asdict(reads),
            "read_gb": reads.loaded * sharing_costs.block_gb(SHAPE),
            "tflop": sharing_costs.products(reads, SHAPE),
            "estimate_ms": {
                "asked": sharing_costs.own_ms(reads, SHAPE, costs),
                "shared": sharing_costs.shared_ms(reads, SHAPE, costs),
            },
        }


#: By how many requests share a chunk, and one in which none do.
CASES = (
    *(SharedCase(64, 64, chunks, 512, 1104) for chunks in (128, 512, 1024, 2048, 4096)),
    SharedCase(64, 64, 4096, 512, 1104, apart=True),
    SharedCase(16, 64, 128, 512, 1104),
    SharedCase(16, 64, 256, 512, 1104),
    SharedCase(256, 16, 64, 512, 336),
    SharedCase(256, 16, 256, 512, 336),
    SharedCase(256, 10, 256, 176, 300),
    SharedCase(8, 64, 64, 512, 1104),
    SharedCase(64, 20, 100, 512, 400),
)


def shared_batch(
    scene: Scene,
    launch: GroupLaunch,
    cells: int,
    costs: SharingCosts | None = None,
    *,
    bare: bool = False,
) -> SharedDecodeBatch:
    """The batch under test, filled; without `costs` every cell with two readers is shared."""
    requests, width = scene.table.shape
    table = SharedRequestTable(
        requests,
        width + 4,
        scene.table.device,
        scene.shape,
        unrotated=bare,
        costs=costs or SharingCosts.always(),
        layout=GroupRows.of(scene.shape.group, cells),
    )
    scene.put(table, range(requests))
    batch = SharedDecodeBatch(table, requests, scene.shape, scene.rope, launch=launch)
    for held in (batch.partial, batch.lse, batch.parts, batch.part_lse):
        held.fill_(float("nan"))
    batch.fill(scene.table, torch.arange(requests).int().to(scene.table.device), scene.lengths)
    return batch


def checks(device: str, seed: int) -> Iterator[tuple[str, float]]:
    """Heads and types of many kinds on small scenes with poisoned caches: name and error.

    Off the GPU kernels are interpreted, and scenes are tiny.
    """
    small = device == "cpu"
    case = SharedCase(5, 2, 3, 40, 19) if small else SharedCase(70, 5, 9, 300, 130)
    shapes = [(4, 2, 32), (3, 3, 16)] if small else [(32, 8, 128), (16, 1, 128), (7, 7, 64)]
    types = [torch.float32, torch.float16] if small else list(scenes.TOLERANCE)
    for heads, dtype, bare in product(shapes, types, (False, True)):
        shape = HeadShape(*heads, dtype)
        scene = case.scene(shape, seed, device, unrotated=bare, poison=True)
        query = scene.queries(case.requests, seed)
        out = torch.empty_like(query)
        batch = shared_batch(scene, GroupLaunch.of(shape, unrotated=bare), 8, bare=bare)
        arm = partial(batch.attend, query, scene.kv_cache, scene.scale, out)
        name = f"{heads} {str(dtype)[6:]} {'without' if bare else 'with'} RoPE"
        yield name, check(f"shared decode {name}", scene, query, out, arm)


def measure(settings: DecodeShared) -> Outcome:
    """Check, then on a GPU time the chosen cases; writes shared-decode.json and .md.

    Raises InvalidRun where an output is wrong, ConfigError for a GPU where vLLM serves none.
    """
    if settings.device == CUDA.name:
        find(CUDA.name)
    errors = dict(checks(settings.device, settings.seed))
    worst = "\n".join(f"{name}: {error:.1e}" for name, error in errors.items())
    if settings.device == "cpu":
        return Outcome(f"Relative errors against float64, interpreted:\n{worst}")
    click.echo(worst, err=True)
    document: Row = {"schema": 1, "provenance": kernels.run_facts(settings), "checks": errors}
    document |= {"host": grouping_times(), "cases": []}
    cases = (
        (case.name, partial(case.measure, settings.rounds, settings.seed))
        for number, case in enumerate(CASES)
        if not settings.case or number in settings.case
    )
    base = settings.output / "shared-decode"
    outcome = kernels.measure_cases(base, document, "cases", cases, report)
    update_summary(settings.output, {"shared_decode": summarise(document["cases"])})
    return outcome


def grouping_times(rows: int = 256, chosen: int = 64, chunks: int = 2048) -> dict[str, float]:
    """Milliseconds of the host, medians: requests that go and come, and steps without any.

    A request reads `chosen` chunks; `changes` collects what the device has to be told.
    """
    made = ReaderGroups(rows, 512, 8192, 16384, SHAPE, SharingCosts(), GroupRows.of(SHAPE.group))
    dice = random.Random(0)

    def cells() -> list[KeyCell]:
        found = []
        for place in range(chosen):
            contents = np.zeros((3, CELL_BLOCKS), np.int32)
            contents[0] = np.arange(CELL_BLOCKS) + CELL_BLOCKS * dice.randrange(chunks)
            contents[1] = 0xFFFF
            key = contents.tobytes()
            found.append(KeyCell(key, contents, 0, CELL_BLOCKS // 4, 512 * place))
        return found

    for row in range(rows):
        made.add(row, cells())
    made.take_changes()
    times = defaultdict[str, list[float]](list)
    for _ in range(200):
        row, new = dice.randrange(rows), cells()
        steps: dict[str, Attend] = {
            "goes": partial(made.remove, row),
            "comes": partial(made.add, row, new),
            "changes": made.take_changes,
            "idle": made.take_changes,
        }
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            times[name].append(1e3 * (time.perf_counter() - began))
    return {name: statistics.median(spent) for name, spent in times.items()}


def summarise(cases: Sequence[Row]) -> dict[str, float]:
    """Figures of the summary: what is not shared over `own`, and a layer where most is."""
    found = {}
    for row in cases:
        if row["apart"]:
            found["unshared_vs_own"] = 1 / row["own_over"]["chosen"]["median"]
        elif row["case"] == CASES[0].name:
            found["layer_ms"] = row["ms"]["shared"]["median"]
            if "fa3" in row["ms"]:
                found["fa3_ms"] = row["ms"]["fa3"]["median"]
    return found


_ABOUT = """\
{gpu}, driver {driver}, CUDA {cuda}, torch {torch}, Triton {triton}, vLLM {vllm}, 32 heads, 8 KV
heads, head size 128, bfloat16, seed {seed}, {rounds} rounds, commit {commit}. Milliseconds of a
layer, medians of CUDA graphs replayed in random order. `own`: each request reads its blocks.
`chosen`: what the cost model chooses. The next shared ones share wherever two requests can;
`of ...` are parts of `shared`. `est.`: what the cost model expects of the shared cells."""


def report(document: Row) -> str:
    """The page, in Markdown, with the best rates of all cases: what to put into `SharingCosts`."""
    arms = ("fa3", "own", "chosen", *LAUNCHES, "of groups", "of tiles", "of merge")
    cases, rows = document["cases"], []
    for row in cases:
        ms = {name: f"{times['median']:.3f}" for name, times in row["ms"].items()}
        estimates = (f"{row['estimate_ms'][name]:.3f}" for name in ("asked", "shared"))
        ratio = f"{row['own_over']['chosen']['median']:.2f}"
        last = (ratio, *estimates, f"{row['errors']['shared']:.1e}")
        shown = (ms.get(arm, NOTHING) for arm in arms)
        rows.append([row["case"], f"{row['sharing']:.1f}", *shown, *last])

    def best(amount: str) -> float:
        rates = [row[amount] / row["ms"]["of groups"]["median"] for row in cases]
        return max(rates, default=0.0)

    idle = [row["ms"]["of groups"]["best"] for row in cases if row["apart"]]
    last_head = ("own/chosen", "est. alone", "est. shared", "error")
    return page(
        "Decode that reads shared chunks once",
        _ABOUT.format(**document["provenance"]),
        f"Host, 256 requests of 64 chunks, ms: {document['host']}",
        f"Costs found: shared_gb_ms >= {best('read_gb'):.2f}, tflop_ms >= {best('tflop'):.3f}, "
        f"launch_ms about {min(idle, default=float('nan')):.4f}",
        table(("case", "sharing", *arms, *last_head), rows),
    )
