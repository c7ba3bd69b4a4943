"""`picbench measure`: kernels, the chunk store, tiers and engines, one by one or all on a GPU."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from picbench.cli.guard import CommandGroup
from picbench.cli.measuring.measure_break_even import break_even
from picbench.cli.measuring.measure_frontier import algorithms
from picbench.cli.measuring.measure_host import host_path, host_tier, small_steps
from picbench.cli.measuring.measure_profile import profile_check
from picbench.cli.measuring.measure_serving import decode_load, load_report, scaling
from picbench.cli.measuring.measurement import (
    COMMIT,
    DEVICE,
    EAGER,
    FILE,
    FOLDER,
    MODEL,
    ON_GPU,
    REPEATS,
    SEED,
    exact_float32,
)

_ON_CPU = click.option("--output", type=FOLDER, default=Path("results/cpu"), show_default=True)


@click.group(cls=CommandGroup)
def measure() -> None:
    """Measure and check parts of picbench by themselves."""


@measure.command(name="all")
@ON_GPU
@COMMIT
@click.option("--only", multiple=True, metavar="STEP", help="Run these steps and no others.")
@click.option("--redo", is_flag=True, help="Repeat steps that are done.")
@click.option("--list", "listing", is_flag=True, help="Show the steps; run none.")
@click.option("--runs", type=FOLDER, default=Path("runs/gpu"), show_default=True, help="Scratch.")
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
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="What to measure on; auto is what the installed vLLM serves here.",
)
@click.option(
    "--output",
    type=FOLDER,
    default=Path("runs/kernels"),
    show_default=True,
    help="Where tables go. Cases that are in them, from the same commit, are not timed again on a "
    "GPU.",
)
@click.option("--rounds", type=click.IntRange(5), default=21, show_default=True, help="Of a case.")
@click.option("--seconds", type=float, default=20.0, show_default=True, help="Of a case on a CPU.")
@click.option("--threads", type=click.IntRange(1), show_default="all cores", help="Of a CPU.")
@click.option(
    "--work",
    multiple=True,
    type=click.Choice(("decode", "link", "prefill", "chunked")),
    help="Only cases of these kinds; a GPU has decode and link, a CPU all but link.",
)
@SEED
@COMMIT
def kernels(device: str, output: Path, threads: int | None, seconds: float, **options: Any) -> None:
    """Check the kernels, then time them against those that vLLM itself uses.

    On a GPU that is FlashAttention-3, on a CPU vLLM's own attention. A kernel whose output is wrong
    is not timed: the command ends with exit code 3. Prints a table.
    """
    from picbench.workloads.models.extras import engine_packages

    with engine_packages():
        from picbench.engines.vllm.device import CUDA, find

        here = find(device)
    if here is CUDA:
        from picbench.measure.kernels.gpu_attention import bench as on_cuda

        on_cuda(output, **options)
        click.echo((output / "kernels.md").read_text(encoding="utf-8"))
        return
    import torch

    from picbench.measure.kernels.cpu_attention import bench as on_cpu

    torch.set_num_threads(threads or torch.get_num_threads())
    click.echo(on_cpu(output, seconds=seconds, **options))


@measure.command(name="shared-decode")
@ON_GPU
@COMMIT
@DEVICE
@click.option("--rounds", type=click.IntRange(2), default=15, show_default=True, help="Of a case.")
@click.option("--case", "only", type=int, multiple=True, help="Only these, by number from 0.")
@SEED
def shared_decode(output: Path, **options: Any) -> None:
    """Check decode that reads shared chunks once, then time it against FlashAttention-3.

    A kernel whose output is wrong is not timed: the command ends with exit code 3. On a CPU kernels
    are interpreted, and tiny scenes are checked.
    """
    if options["device"] == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    from picbench.workloads.models.extras import engine_packages

    with engine_packages():
        from picbench.measure.kernels import shared_speed as measuring

    click.echo(measuring.measure(output, **options))


@measure.command(name="chunk-store")
@_ON_CPU
@click.option("--repeats", type=click.IntRange(2), default=300, show_default=True)
def chunk_store(output: Path, repeats: int) -> None:
    """What looking up, using, evicting and planning chunks costs the scheduler."""
    from picbench.measure import chunk_store as measuring

    click.echo(measuring.measure_all(repeats, output))


@measure.command()
@_ON_CPU
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
@_ON_CPU
@COMMIT
@click.option("--model", default="testbed", show_default=True)
@click.option("--rounds", type=click.IntRange(2), default=21, show_default=True)
def decode(output: Path, commit: str | None, model: str, rounds: int) -> int:
    """What decoding a planned request costs on a CPU; exit 1 if it costs too much.

    That is beside a plain request in the same engine. Threads are as many as OMP_NUM_THREADS says.
    """
    from picbench.measure.engine import decode_cost as measuring

    allowed, page = measuring.measure(model, rounds, commit, output)
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
@DEVICE
@click.option("--model", default="testbed", show_default=True, help="With full attention and RoPE.")
@click.option("--dtype", type=click.Choice(("float32", "bfloat16", "float16")), default="float32")
@EAGER
@click.option("--synchronous", is_flag=True, help="Schedule no step ahead.")
@click.option("--keys-without-rope", is_flag=True, help="Cache all keys without RoPE.")
@click.option("--tensor-parallel", type=click.IntRange(1), default=1, help="GPUs of the engine.")
@click.option(
    "--shared-decode",
    type=click.Choice(("off", "auto", "always")),
    default="off",
    show_default=True,
    help="Read chunks once for all requests that decode; always, also where that is slower.",
)
def oracle(**settings: Any) -> int:
    """Compare an engine with the oracle; exit 1 where they differ."""
    exact_float32()
    from picbench.measure.engine import oracle_check

    return 0 if oracle_check.measure(**settings) else 1


@measure.command()
@ON_GPU
@COMMIT
@DEVICE
@click.option("--dtype", type=click.Choice(("float32", "bfloat16", "float16")), default="float32")
@EAGER
@click.option("--only", multiple=True, metavar="NAME", help="Only these; repeat the flag for more.")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="At a time.")
def architectures(**settings: Any) -> int:
    """Compare engines with the oracle on a tiny model of each architecture; exit 1 where wrong.

    Needs no network. Architectures that are refused must be refused for the reason that picbench
    list models gives.
    """
    from picbench.measure.engine import architecture_check

    return 0 if architecture_check.measure(**settings) else 1


@measure.command()
@ON_GPU
@COMMIT
@click.option("--model", default="shape:small", show_default=True)
@click.option("--device", default="auto", show_default=True, help="cuda or cpu.")
@click.option("--dtype", type=click.Choice(("float32", "bfloat16")), default="float32")
@EAGER
@click.option("--synchronous", is_flag=True, help="Schedule no step ahead.")
@click.option("--tensor-parallel", type=click.IntRange(1), default=1, help="Workers.")
@click.option("--pool", type=click.IntRange(32), default=5000, show_default=True, help="Blocks.")
@click.option("--tiers", default="", show_default="none", help="As for picbench run.")
@click.option("--requests", type=click.IntRange(1), default=1000, show_default=True)
@click.option(
    "--longest",
    type=click.IntRange(256),
    default=32_000,
    show_default=True,
    help="Prompt tokens. Shapes get as many positions as that needs.",
)
@click.option("--preemptions", type=int, default=0, show_default=True, help="At least so many.")
@SEED
def storm(output: Path, commit: str | None, **options: Any) -> int:
    """Compare a starved pool under mixed requests and aborts with a large one; exit 1 if wrong."""
    exact_float32()
    from picbench.measure.engine import storm as measuring

    wrong, page = measuring.measure(measuring.StormSettings(**options), commit, output)
    click.echo(page)
    return 1 if wrong else 0


@measure.command(name="engine-comparison")
@ON_GPU
@COMMIT
@MODEL
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
def engine_comparison(output: Path, commit: str | None, model: str, repeats: int) -> None:
    """Time the engine against stock vLLM on one GPU."""
    from picbench.measure.engine import comparison

    comparison.measure(model, repeats, commit, output)


@measure.command()
@ON_GPU
@COMMIT
@DEVICE
@click.option("--dtype", type=click.Choice(("float32", "bfloat16")), default="bfloat16")
@click.option(
    "--rows",
    type=click.IntRange(1),
    default=200,
    show_default=True,
    help="Of each set. The card is about 200: other numbers are shown beside it and not judged.",
)
@EAGER
def accuracy(
    output: Path, commit: str | None, device: str, dtype: str, rows: int, eager: bool
) -> None:
    """Score the testbed model in the engine; exit 3 where its card has another score."""
    exact_float32()
    from picbench.measure import accuracy as measuring

    measuring.measure(device, dtype, rows, eager, commit, output)


@measure.command()
@ON_GPU
@COMMIT
@DEVICE
@MODEL
@REPEATS
@click.option("--longest", type=click.IntRange(2), default=98, show_default=True, help="Chunks.")
def context(
    output: Path, commit: str | None, device: str, model: str, repeats: int, longest: int
) -> None:
    """TTFT against the length of the context, 1k to 50k tokens."""
    from picbench.measure.engine import context as measuring

    measuring.measure(model, device, repeats, longest, commit, output)
    click.echo((output / "context.md").read_text(encoding="utf-8"))


@measure.command(name="rope-pad-ablation")
@ON_GPU
@COMMIT
@DEVICE
@MODEL
@click.option("--dtype", type=click.Choice(("float32", "bfloat16")), default="bfloat16")
@EAGER
@click.option("--chunks", type=click.IntRange(4), default=64, show_default=True, help="Timed.")
@click.option("--repeats", type=click.IntRange(2), default=9, show_default=True)
@click.option(
    "--rows", type=click.IntRange(2), default=50, show_default=True, help="Of each data set."
)
def rope_pad_ablation(output: Path, commit: str | None, **settings: Any) -> None:
    """Keys rotated in attention or before it, pads masked or counted: times, blocks, scores."""
    from picbench.measure.engine import rope_pad_ablation as measuring

    click.echo(measuring.measure(measuring.AblationSettings(**settings), commit, output))


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
    """Compare run directories of the arm full with files of replies; exit 3 where they differ."""
    from picbench.measure.agreement import measure

    click.echo(measure(runs, files, output))


measure.add_command(algorithms)
measure.add_command(break_even)
measure.add_command(profile_check)
measure.add_command(decode_load)
measure.add_command(load_report)
measure.add_command(scaling)
for command in (host_path, host_tier, small_steps):
    measure.add_command(command)
