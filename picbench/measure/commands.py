"""The command line: `python -m picbench.gpu check`, and each measurement by itself."""

import os
from collections.abc import Sequence
from pathlib import Path

import click

from picbench.cli.guard import GuardedGroup

_COMMIT = click.option("--commit", default=None, help="What to call the code [this checkout's].")
_DEVICE = click.option("--device", default="cuda", show_default=True, help="cuda or cpu.")
_MODEL = click.option("--model", default="shape:llama-3.1-8b", show_default=True)
_OUTPUT = click.option(
    "--output", type=click.Path(path_type=Path), default=Path("results/gpu"), show_default=True
)
_REPEATS = click.option("--repeats", type=click.IntRange(1), default=3, show_default=True)
_RUN = click.Path(path_type=Path, file_okay=False)


@click.group(cls=GuardedGroup)
def main() -> None:
    """Check and measure picbench on a GPU host."""


@main.command()
@_OUTPUT
@_COMMIT
@click.option("--only", multiple=True, metavar="STEP", help="Run these steps and no others.")
@click.option("--redo", is_flag=True, help="Repeat steps that are done.")
@click.option("--list", "listing", is_flag=True, help="Show the steps; run none.")
@click.option("--runs", type=_RUN, default=Path("runs/gpu"), show_default=True, help="Scratch.")
def check(
    output: Path, commit: str | None, only: Sequence[str], redo: bool, listing: bool, runs: Path
) -> int:
    """Run every check, then every measurement; go on where an earlier call stopped."""
    from picbench.measure.kernels import facts
    from picbench.measure.steps import run_steps, steps

    found = steps(output, runs, commit)
    if listing:
        for step in found:
            click.echo(f"{step.name:12} {step.summary}")
        return 0
    return run_steps(found, runs, only, commit or facts.commit(), redo=redo)


@main.command()
@_OUTPUT
@_COMMIT
@_DEVICE
@click.option("--dtype", type=click.Choice(("float32", "bfloat16")), default="bfloat16")
@click.option(
    "--rows",
    type=click.IntRange(1),
    default=200,
    show_default=True,
    help="Of each set. The card speaks of 200: other numbers are shown beside it and not judged.",
)
@click.option("--eager", is_flag=True)
def accuracy(
    output: Path, commit: str | None, device: str, dtype: str, rows: int, eager: bool
) -> None:
    """Score the testbed model in the engine; exit 3 where its card says something else."""
    from picbench.measure import accuracy as measuring

    # Triton multiplies float32 in TensorFloat-32 unless told otherwise when it is imported.
    os.environ["TRITON_F32_DEFAULT"] = "ieee"
    measuring.measure(device, dtype, rows, eager, commit, output)


@main.command()
@_OUTPUT
@_COMMIT
@_DEVICE
@_MODEL
@_REPEATS
@click.option("--longest", type=click.IntRange(2), default=98, show_default=True, help="Chunks.")
def context(
    output: Path, commit: str | None, device: str, model: str, repeats: int, longest: int
) -> None:
    """TTFT against the length of the context, 1k to 50k tokens."""
    from picbench.measure import context as measuring

    measuring.measure(model, device, repeats, longest, commit, output)
    click.echo((output / "context.md").read_text(encoding="utf-8"))


@main.command()
@_OUTPUT
@_COMMIT
@_DEVICE
@_MODEL
@_REPEATS
@click.option("--workers", type=click.IntRange(2), default=2, show_default=True, help="GPUs.")
@click.option("--concurrency", type=click.IntRange(1), default=64, show_default=True)
def scaling(
    output: Path,
    commit: str | None,
    device: str,
    model: str,
    repeats: int,
    workers: int,
    concurrency: int,
) -> None:
    """Throughput of an engine on several GPUs against one."""
    from picbench.measure import scaling as measuring

    measuring.measure(model, device, workers, concurrency, repeats, commit, output)
    click.echo((output / f"scaling-{workers}.md").read_text(encoding="utf-8"))


@main.command()
@_OUTPUT
@_COMMIT
@click.option("--throughput", type=_RUN, help="Run directory.")
@click.option("--memory", type=_RUN, help="Run directory.")
def load(output: Path, commit: str | None, throughput: Path | None, memory: Path | None) -> None:
    """A table of runs under load, and the ratios that it comes to."""
    from picbench.measure import load as table

    table.write(throughput, memory, commit, output)
    click.echo((output / "load.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
