"""`picbench measure`: all steps of a GPU host, small parts by themselves, and the group of all."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from picbench.cli.guard import CommandGroup
from picbench.cli.measuring.measure_algorithms import algorithms
from picbench.cli.measuring.measure_break_even import break_even
from picbench.cli.measuring.measure_engine import (
    accuracy,
    architectures,
    decode,
    engine_comparison,
    oracle,
    rope_pad_ablation,
    storm,
)
from picbench.cli.measuring.measure_host import host_tier, small_steps
from picbench.cli.measuring.measure_kernels import kernels, shared_decode
from picbench.cli.measuring.measure_profile import profile_check
from picbench.cli.measuring.measure_serving import decode_load, load_report, scaling
from picbench.cli.measuring.measurement import COMMIT, ON_GPU, SEED
from picbench.cli.options import FILE, FOLDER


@click.group(cls=CommandGroup)
def measure() -> None:
    """Measure and check parts of picbench by themselves."""


@measure.command(name="all")
@ON_GPU
@COMMIT
@click.option("--only", multiple=True, metavar="STEP", help="Run these steps and no others.")
@click.option("--redo", is_flag=True, help="Repeat steps that are done.")
@click.option("--list", "listing", is_flag=True, help="Show the steps; run none.")
@click.option(
    "--runs",
    type=FOLDER,
    default=Path("runs/gpu"),
    show_default=True,
    help="Folder for scratch files.",
)
def every(
    output: Path, commit: str | None, only: Sequence[str], redo: bool, listing: bool, runs: Path
) -> int:
    """Run every check on a GPU, then every measurement; continue where an earlier call stopped."""
    from picbench.measure.steps import run_steps, steps
    from picbench.output import provenance

    found = steps(output, runs, commit)
    if listing:
        for step in found:
            click.echo(f"{step.name:12} {step.summary}")
        return 0
    return run_steps(found, runs, only, commit or provenance.checkout(), redo=redo)


@measure.command()
@click.option("--tiers", required=True, help="Tiers to measure, each alone, as for picbench run.")
@click.option("--sizes", default="1MiB,4MiB,16MiB,32MiB", show_default=True, help="Value sizes.")
@click.option("--batch", default="64MiB", show_default=True, help="Bytes in flight at a time.")
@click.option("--rounds", default=7, show_default=True, type=click.IntRange(min=1))
@SEED
@click.option("--output", type=FILE, help="JSON file to write.")
def tiers(**options: Any) -> None:
    """How fast tiers store and fetch chunks."""
    from picbench.measure import tiers as measuring

    click.echo(measuring.measure_all(**options))


for command in (
    *(
        accuracy,
        architectures,
            decode,
        engine_comparison,
        oracle,
        rope_pad_ablation,
        storm,
    ),
    *(kernels, shared_decode),
    *(decode_load, load_report, scaling, storm),
    *(host_tier, small_steps),
    *(algorithms, break_even, profile_check),
):
    measure.add_command(command)
