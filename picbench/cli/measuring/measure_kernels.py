"""`picbench measure kernels` and `shared-decode`: attention against what vLLM itself uses."""

import os
from pathlib import Path
from typing import Any

import click

from picbench.cli.guard import GuardedCommand
from picbench.cli.measuring.measurement import COMMIT, DEVICE, ON_GPU, SEED
from picbench.cli.options import FOLDER


@click.command(cls=GuardedCommand)
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


@click.command(name="shared-decode", cls=GuardedCommand)
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
