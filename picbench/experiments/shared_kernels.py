"""Decode that reads shared chunks once, checked and timed beside that of single requests."""

import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import click
import numpy as np
import torch
from torch import Tensor

from picbench.experiments.kernels import (
    SHAPE,
    STOCK_SPLITS,
    Attend,
    Row,
    check,
    host_ms,
    measure_cases,
    own_batch,
    paired,
    replayed,
    run_facts,
    spreads,
    stock_arm,
)
from picbench.experiments.scenes import TOLERANCE, ChunkReads, Scene, draw, rope_table
from picbench.kernels.cuda.decode.attention import read_tiles
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
from picbench.kernels.shape import HeadShape
from picbench.run.measurements import DecodeShared, Outcome
from picbench.tables.page import page, update_summary
from picbench.tables.table import NOTHING, table

#: Every cell with two readers is shared, whatever it costs.
FORCED = SharingCosts.always()

#: The kernel of groups launched in other ways than by default, and blocks of its cells.
LAUNCHES: Mapping[str, tuple[GroupLaunch, int]] = {
    "shared": (GroupLaunch(), 32),
    "in turn": (GroupLaunch(overlap=False), 32),
    "triton": (GroupLaunch(gluon=False), 32),
    "buffers5": (GroupLaunch(buffers=5), 32),
    "cells16": (GroupLaunch(), 16),
}

# Arms whose output is not a whole layer's, and those that know no shifts.
_PARTS = ("of groups", "of tiles", "of merge")
_UNCHECKED = (*_PARTS, "fa3")


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
    ) -> Scene:
        """Random keys, values and choices."""
        lengths = [self.length] * self.chunks
        return draw(
            [read.slots(lengths, unrotated=unrotated) for read in self.reads(seed)],
            shape,
            rope_table(shape.head_size, self.chosen * self.length + self.tail + 1, device),
            device=device,
            seed=seed,
            chunks=lengths,
            poison=poison,
        )

    def measure(self, rounds: int, seed: int) -> Row:
        """Check all arms but FlashAttention-3, which knows no shifts, then time them on a GPU.

        Raises InvalidRun where an error is too large.
        """
        scene = self.scene(SHAPE, seed, "cuda", poison=False)
        query = scene.queries(self.requests, seed)
        out = torch.empty_like(query)
        arms, batch = arms_of(scene, query, out)
        errors = {
            name: check(f"shared decode {name} of {SHAPE}", scene, query, out, arm)
            for name, arm in arms.items()
            if name not in _UNCHECKED
        }
        samples = replayed(arms, rounds, seed)
        reads = batch.table.groups_of.reads
        return {
            "case": self.name,
            "sharing": self.sharing,
            "apart": self.apart,
            "errors": errors,
            "ms": spreads(samples),
            "own_over": {name: paired(samples["own"], times) for name, times in samples.items()},
            "reads": asdict(reads),
            "read_gb": reads.loaded * block_gb(SHAPE),
            "tflop": products(reads, SHAPE),
            "estimate_ms": {
                "asked": own_ms(reads, SHAPE, SharingCosts()),
                "shared": shared_ms(reads, SHAPE, SharingCosts()),
            },
        }


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


def shared_batch(
    scene: Scene, launch: GroupLaunch, cells: int, costs: SharingCosts, *, bare: bool = False
) -> SharedDecodeBatch:
    """The batch under test, filled."""
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
    scene.put(table, range(requests))
    batch = SharedDecodeBatch(table, requests, scene.shape, scene.rope, launch=launch)
    for held in (batch.partial, batch.lse, batch.parts, batch.part_lse):
        held.fill_(float("nan"))
    batch.fill(scene.table, torch.arange(requests).int().to(scene.table.device), scene.lengths)
    return batch


def arms_of(
    scene: Scene, query: Tensor, out: Tensor
) -> tuple[dict[str, Attend], SharedDecodeBatch]:
    """What is timed: whole layers, and (`of ...`) parts of ours; and our batch by default."""
    given = (query, scene.kv_cache, scene.scale)
    found: dict[str, Attend] = {"own": partial(own_batch(scene).attend, *given, out)}
    if flash.covers(scene.shape):
        found["fa3"] = stock_arm(scene, query, out, 1, STOCK_SPLITS)
    for name, (launch, cells) in LAUNCHES.items():
        found[name] = partial(shared_batch(scene, launch, cells, FORCED).attend, *given, out)
    chosen = shared_batch(scene, GroupLaunch(), 32, SharingCosts())
    found["chosen"] = partial(chosen.attend, *given, out)
    batch = shared_batch(scene, GroupLaunch(), 32, FORCED)

    def groups() -> None:
        batch.read_groups(*given)
        batch.counter.zero_()

    tiles = partial(read_tiles, query, scene.kv_cache, batch, scene.scale)
    return found | dict(zip(_PARTS, (groups, tiles, partial(batch.merge, out)), strict=True)), batch


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
                scene = case.scene(shape, seed, device, unrotated=bare, poison=True)
                query = scene.queries(case.requests, seed)
                out = torch.empty_like(query)
                launch = GroupLaunch.of(shape, unrotated=bare)
                batch = shared_batch(scene, launch, 8, FORCED, bare=bare)
                arm = partial(batch.attend, query, scene.kv_cache, scene.scale, out)
                name = f"{heads} {str(dtype)[6:]} {'without' if bare else 'with'} RoPE"
                yield name, check(f"shared decode {name} of {shape}", scene, query, out, arm)


def measure(settings: DecodeShared) -> Outcome:
    """Check, then on a GPU time the chosen cases; writes shared-decode.json and .md.

    Raises InvalidRun where an output is wrong.
    """
    errors = dict(checks(settings.device, settings.seed))
    worst = "\n".join(f"{name}: {error:.1e}" for name, error in errors.items())
    if settings.device == "cpu":
        return Outcome(f"Relative errors against float64, interpreted:\n{worst}")
    click.echo(worst, err=True)
    document: Row = {"schema": 1, "provenance": run_facts(settings), "checks": errors}
    document |= {"host": grouping_times(), "cases": []}
    chosen = (
        (f"{number}: {case.name}", partial(case.measure, settings.rounds, settings.seed))
        for number, case in enumerate(CASES)
        if not settings.case or number in settings.case
    )
    measure_cases(settings.output / "shared-decode", document, "cases", chosen, report)
    update_summary(settings.output, {"shared_decode": summarise(document["cases"])})
    return Outcome(report(document))


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
            spent += host_ms(step, 1)
    return {name: statistics.median(spent) for name, spent in times.items()}


def _cell(chunk: int, shift: int) -> KeyCell:
    blocks = np.arange(CELL_BLOCKS) + CELL_BLOCKS * chunk
    contents = np.stack([blocks, np.full(CELL_BLOCKS, 0xFFFF), np.zeros(CELL_BLOCKS)])
    contents = contents.astype(np.int32)
    return KeyCell(contents.tobytes(), contents, 0, CELL_BLOCKS // 4, shift)


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


def _found_costs(cases: Sequence[Row]) -> str:
    """What to put into `SharingCosts`: the best rates of all cases."""

    def best(amount: str) -> float:
        return max((row[amount] / row["ms"]["of groups"]["median"] for row in cases), default=0.0)

    idle = [row["ms"]["of groups"]["best"] for row in cases if row["apart"]]
    return (
        f"shared_gb_ms >= {best('read_gb'):.2f}, tflop_ms >= {best('tflop'):.3f}, "
        f"launch_ms about {min(idle, default=float('nan')):.4f}"
    )


_ABOUT = """\
{gpu}, driver {driver}, CUDA {cuda}, torch {torch}, Triton {triton}, vLLM {vllm}, 32 heads, 8 KV
heads, head size 128, bfloat16, seed {seed}, {rounds} rounds, commit {commit}. Milliseconds of a
layer, medians of CUDA graphs replayed in random order. `own`: each request reads its blocks.
`chosen`: what the cost model chooses. The next shared ones share wherever two requests can;
`of ...` are parts of `shared`. `est.`: what the cost model expects of the shared cells."""


def report(document: Row) -> str:
    """The page, in Markdown."""
    arms = ("fa3", "own", "chosen", *LAUNCHES, *_PARTS)
    rows = [
        [
            row["case"],
            f"{row['sharing']:.1f}",
            *(f"{row['ms'][arm]['median']:.3f}" if arm in row["ms"] else NOTHING for arm in arms),
            f"{row['own_over']['chosen']['median']:.2f}",
            f"{row['estimate_ms']['asked']:.3f}",
            f"{row['estimate_ms']['shared']:.3f}",
            f"{row['errors']['shared']:.1e}",
        ]
        for row in document["cases"]
    ]
    last = ("own/chosen", "est. alone", "est. shared", "error")
    return page(
        "Decode that reads shared chunks once",
        _ABOUT.format(**document["provenance"]),
        f"Host, 256 requests of 64 chunks, ms: {document['host']}",
        f"Costs found: {_found_costs(document['cases'])}",
        table(("case", "sharing", *arms, *last), rows),
    )
