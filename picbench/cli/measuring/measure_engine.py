"""`picbench measure`: engines against the oracle, stock vLLM, a large pool and known scores."""

from pathlib import Path
from typing import Any

import click

from picbench.cli.guard import GuardedCommand
from picbench.cli.measuring.measurement import (
    COMMIT,
    DEVICE,
    EAGER,
    MODEL,
    ON_CPU,
    ON_GPU,
    REPEATS,
    SEED,
    exact_float32,
)


@click.command(cls=GuardedCommand)
@ON_CPU
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


@click.command(cls=GuardedCommand)
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


@click.command(cls=GuardedCommand)
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


@click.command(cls=GuardedCommand)
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
@click.option("--preemptions", type=int, default=0, show_default=True, help="At least this many.")
@SEED
def storm(output: Path, commit: str | None, **options: Any) -> int:
    """Compare a starved pool under mixed requests and aborts with a large one; exit 1 if wrong."""
    exact_float32()
    from picbench.measure.engine import storm as measuring

    wrong, page = measuring.measure(measuring.StormSettings(**options), commit, output)
    click.echo(page)
    return 1 if wrong else 0


@click.command(name="engine-comparison", cls=GuardedCommand)
@ON_GPU
@COMMIT
@MODEL
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
def engine_comparison(output: Path, commit: str | None, model: str, repeats: int) -> None:
    """Time the engine against stock vLLM on one GPU."""
    from picbench.measure.engine import comparison

    comparison.measure(model, repeats, commit, output)


@click.command(cls=GuardedCommand)
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


@click.command(name="rope-pad-ablation", cls=GuardedCommand)
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
