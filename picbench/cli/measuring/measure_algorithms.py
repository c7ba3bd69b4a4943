"""`picbench measure algorithms`: all algorithms in one engine, on the testbed's data sets."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from picbench.cli.guard import CommandGroup
from picbench.cli.measuring.measurement import (
    COMMIT,
    DEVICE,
    EAGER,
    MODEL,
    ON_GPU,
    SEED,
    exact_float32,
)
from picbench.cli.options import FOLDER

_PARTS = Path("results/testbed/algorithms")

_SERVED = click.option(
    "--parts",
    type=FOLDER,
    default=_PARTS,
    show_default=True,
    help="The output folder of picbench measure algorithms serve.",
)
_PAGES = click.option("--output", type=FOLDER, default=_PARTS.parent, show_default=True)


@click.group(cls=CommandGroup)
def algorithms() -> None:
    """Every algorithm in one engine: scores, linked tokens, and answers in a batch and alone."""


def _serving(output: Path) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options of commands that serve data sets by all algorithms, and write to `output`."""
    options = (
        click.option("--output", type=FOLDER, default=output, show_default=True),
        COMMIT,
        click.option("--model", default="testbed", show_default=True, help="Or a tuned variant."),
        click.option(
            "--dataset",
            "datasets",
            multiple=True,
            metavar="NAME",
            show_default="all six",
            help="Only this one; repeat the flag for more.",
        ),
        click.option("--algo", multiple=True, metavar="SPEC", help="Only these, and full."),
        DEVICE,
        EAGER,
        click.option(
            "--kv-blocks",
            type=click.IntRange(1024),
            default=16_384,
            show_default=True,
            help="Pool of the engine, in blocks of 16 tokens.",
        ),
        click.option("--max-requests", type=click.IntRange(1), default=64, show_default=True),
        SEED,
    )

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@algorithms.command()
@_serving(_PARTS)
@click.option("--dtype", type=click.Choice(("float32", "bfloat16")), default="bfloat16")
@click.option(
    "--rows", type=click.IntRange(1), default=200, show_default=True, help="Rows of each data set."
)
@click.option(
    "--first", type=click.IntRange(0), default=0, show_default=True, help="Skip this many rows."
)
@click.option("--drop", is_flag=True, help="Leave out the passages before those that answer.")
@click.option(
    "--seconds",
    type=float,
    default=0.0,
    show_default="no limit",
    help="Begin no rows after this time.",
)
def serve(output: Path, commit: str | None, **options: Any) -> int:
    """Score all algorithms on every row, in batches of all of them; exit 4 if rows are missing.

    Each data set is a file in the output folder, and the same command continues where it was
    stopped. Several may run at once, each with a data set of its own.
    """
    exact_float32()
    from picbench.measure.algorithms import serve_arms

    return 0 if serve_arms.measure(_settings(serve_arms, options), commit, output) else 4


@algorithms.command()
@_serving(Path("results/gpu"))
@click.option("--dtype", type=click.Choice(("float32", "bfloat16")), default="float32")
@click.option("--requests", type=click.IntRange(1), default=200, show_default=True)
def alone(output: Path, commit: str | None, requests: int, **options: Any) -> None:
    """Compare a batch of all algorithms with each request alone; exit 3 if float32 differs."""
    exact_float32()
    from picbench.measure.algorithms import alone as measuring
    from picbench.measure.algorithms import serve_arms

    measuring.measure(_settings(serve_arms, options), requests, commit, output)


@algorithms.command()
@_SERVED
@_PAGES
def page(parts: Path, output: Path) -> None:
    """Make tables and the figure from the scores; needs no engine."""
    from picbench.measure.algorithms import algorithms_page

    click.echo(algorithms_page.write(parts, output))


@algorithms.command()
@_SERVED
@_PAGES
def depth(parts: Path, output: Path) -> None:
    """Scores by depth of the needle, hops, and distance between chunks; needs no engine."""
    from picbench.measure.depth import depth_page

    click.echo(depth_page.write(parts, output))


@algorithms.command(name="warm-chunks")
@ON_GPU
@COMMIT
@DEVICE
@MODEL
@click.option("--repeats", type=click.IntRange(2), default=9, show_default=True)
@click.option("--chunks", type=click.IntRange(2), default=64, show_default=True)
@click.option(
    "--busy-cores",
    "busy",
    type=click.IntRange(0),
    default=max(1, (os.cpu_count() or 2) // 2),
    show_default="half of them",
    help="Measure everything also while this many cores are busy; 0: do not.",
)
def warm_chunks(output: Path, commit: str | None, **options: Any) -> None:
    """TTFT of 32k tokens of warm chunks as served, beside a prefix hit; on an H200 3 minutes."""
    from picbench.measure.warm import warm_chunks as measuring

    measuring.measure(measuring.WarmSettings(**options), commit, output)
    click.echo((output / "warm-chunks.md").read_text(encoding="utf-8"))


def _settings(module: Any, options: dict[str, Any]) -> Any:
    from picbench.workloads.testbed import DATASETS

    return module.ServeSettings(**options | {"datasets": options["datasets"] or DATASETS})
