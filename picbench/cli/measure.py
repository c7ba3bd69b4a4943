"""`picbench kernels`: attention kernels without an engine."""

from pathlib import Path

import click

from picbench.cli.guard import traced


@click.group()
def kernels() -> None:
    """Attention kernels by themselves."""


@kernels.command()
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="What to measure on; auto is what the installed vLLM serves here.",
)
@click.option(
    "--output",
    metavar="DIR",
    default="runs/kernels",
    show_default=True,
    help="Where tables go. Cases that are in them, from the same commit, are not timed again on a "
    "GPU.",
)
@click.option("--rounds", type=click.IntRange(5), default=21, show_default=True, help="Of a case.")
@click.option("--seed", type=int, default=0, show_default=True, help="For inputs and order.")
@click.option("--commit", metavar="NAME", help="What to call the code, without a checkout.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def bench(
    *, device: str, output: str, rounds: int, seed: int, commit: str | None, debug: bool
) -> int:
    """Check the kernels, then time them against the library's that they stand beside.

    On a GPU that is FlashAttention-3, on CPU vLLM's own attention. A kernel whose output is wrong
    is not timed: the command ends with exit code 3. Prints a table.
    """
    with traced(debug):
        return _bench(device, Path(output), rounds, seed, commit)


def _bench(device: str, output: Path, rounds: int, seed: int, commit: str | None) -> int:
    from picbench.workloads.models.extras import engine_packages

    with engine_packages():
        from picbench.engines.vllm.device import CUDA, find

        here = find(device)
    if here is CUDA:
        from picbench.measure.kernels.gpu_attention import bench as on_cuda

        on_cuda(output, rounds, seed, commit=commit)
        click.echo((output / "kernels.md").read_text(encoding="utf-8"))
        return 0
    from picbench.measure.kernels.cpu_attention import bench as on_cpu

    click.echo(on_cpu(output / "attention.json", rounds, seed))
    return 0
