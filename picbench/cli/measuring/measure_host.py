"""`picbench measure`: what engines wait for on the host."""

from pathlib import Path
from typing import Any

import click

from picbench.cli.guard import GuardedCommand
from picbench.cli.measuring.measurement import (
    COMMIT,
    DEVICE,
    MODEL,
    ON_GPU,
    REPEATS,
    exact_float32,
)

_CHUNKS = click.option(
    "--chunks", type=click.IntRange(2), default=64, show_default=True, help="A prompt."
)


@click.command(cls=GuardedCommand, name="host-tier")
@ON_GPU
@COMMIT
@DEVICE
@MODEL
@REPEATS
@_CHUNKS
def host_tier(**settings: Any) -> None:
    """Check chunks from the host's memory, then time stores and loads, and requests meanwhile."""
    exact_float32()
    from picbench.measure import host_tier as measuring

    click.echo(measuring.measure(**settings))


@click.command(cls=GuardedCommand, name="small-steps")
@ON_GPU
@COMMIT
@DEVICE
@MODEL
@REPEATS
@click.option(
    "--graph-tokens",
    type=click.IntRange(1),
    multiple=True,
    default=(512, 1024),
    show_default=True,
    help="The largest step, in tokens, that CUDA graphs serve; two engines for each value.",
)
def small_steps(output: Path, commit: str | None, **settings: Any) -> None:
    """TTFT of prompts that compute few tokens, by the size of graphs, and the GPU's part of it."""
    from picbench.measure.engine import small_steps as measuring

    click.echo(measuring.measure(**settings, commit=commit, output=output))
