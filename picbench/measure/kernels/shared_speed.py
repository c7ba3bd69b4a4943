"""Checks and times decode that reads shared chunks once, against FlashAttention-3 and our own.

Writes shared-decode.json and shared-decode.md, and figures of summary.json.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from picbench.kernels.cuda.decode.shared.group_rows import GroupRows
from picbench.kernels.cuda.decode.shared.key_cells import CELL_BLOCKS, KeyCell
from picbench.kernels.cuda.decode.shared.reader_groups import ReaderGroups
from picbench.kernels.cuda.decode.shared.sharing_costs import (
    SharingCosts,
    block_gb,
    own_ms,
    products,
    shared_ms,
)
from picbench.kernels.shape import HeadShape
from picbench.measure.kernels import shared_cases
from picbench.measure.kernels.shared_cases import SharedCase
from picbench.measure.kernels.timing import interleave, paired
from picbench.measure.report import Spread, save, update_summary
from picbench.output import markdown, provenance

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
