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
    context,
    decode,
    engine_comparison,
    oracle,
    rope_pad_ablation,
    storm,
)
from picbench.cli.measuring.measure_host import host_path, host_tier, small_steps
from picbench.cli.measuring.measure_kernels import kernels, shared_decode
from picbench.cli.measuring.measure_profile import profile_check
from picbench.cli.measuring.measure_serving import decode_load, load_report, scaling
from picbench.cli.measuring.measurement import COMMIT, ON_CPU, ON_GPU, SEED
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


@measure.command(name="chunk-store")
@ON_CPU
@click.option("--repeats", type=click.IntRange(2), default=300, show_default=True)
def chunk_store(output: Path, repeats: int) -> None:
    """What looking up, using, evicting and planning chunks costs the scheduler."""
    from picbench.measure import chunk_store as measuring

    click.echo(measuring.measure_all(repeats, output))


@measure.command()
@ON_CPU
@COMMIT
@click.option("--samples", type=click.IntRange(2), default=10_000, show_default=True)
@click.option("--requests", type=click.IntRange(4), default=4000, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
def harness(output: Path, commit: str | None, **options: Any) -> int:
    """What commands and `picbench run` itself cost; exit 1 if that is too much.

    Engines answer at once. Samples are those of each arm of the runs that are compared and
    reported, requests those of the runs that are timed.
    """
    from picbench.measure.harness import harness_speed as measuring

    allowed, page = measuring.measure_all(measuring.HarnessSettings(**options), commit, output)
    click.echo(page)
    return 0 if allowed else 1


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


@measure.command()
@ON_GPU
@COMMIT
@click.option("--throughput", type=FOLDER, help="Run directory.")
@click.option("--memory", type=FOLDER, help="Run directory.")
def load(output: Path, commit: str | None, throughput: Path | None, memory: Path | None) -> None:
    """A table of runs under load, and the ratios that it comes to."""
    from picbench.measure import load as table

    table.write(throughput, memory, commit, output)
    click.echo((output / "load.md").read_text(encoding="utf-8"))


@measure.group(cls=CommandGroup)
def agreement() -> None:
    """Compare vLLM's replies with those of Hugging Face's own model."""


@agreement.command()
@click.option("--dtype", type=click.Choice(("float32", "bfloat16")), required=True)
@click.option("--model", type=FOLDER, show_default="the testbed's", help="The model folder.")
@click.option("--rows", type=click.IntRange(1), default=200, help="Rows of every data set.")
@click.option("--dataset", "datasets", multiple=True, help="Only these; repeat the flag for more.")
@click.option("--output", type=FILE, required=True, help="The file to write.")
def replies(
    dtype: str, model: Path | None, rows: int, datasets: tuple[str, ...], output: Path
) -> None:
    """Collect greedy replies of LlamaForCausalLM, on a GPU if there is one."""
    from picbench.measure.replies import collect
    from picbench.workloads.testbed import DATASETS, model_path

    collect(model or model_path(), dtype, datasets or DATASETS, rows, output)


@agreement.command()
@click.argument("runs", type=FOLDER, nargs=-1, required=True)
@click.option("--replies", "files", type=FILE, multiple=True, required=True)
@click.option("--output", type=FOLDER, required=True, help="The folder to write to.")
def compare(runs: tuple[Path, ...], files: tuple[Path, ...], output: Path) -> None:
    """Compare run directories of the arm full with files of replies; exit 3 if they differ."""
    from picbench.measure.agreement import measure

    click.echo(measure(runs, files, output))


for command in (
    *(
        accuracy,
        architectures,
        context,
        decode,
        engine_comparison,
        oracle,
        rope_pad_ablation,
        storm,
    ),
    *(kernels, shared_decode),
    *(decode_load, load_report, scaling, storm),
    *(host_path, host_tier, small_steps),
    *(algorithms, break_even, profile_check),
):
    measure.add_command(command)
