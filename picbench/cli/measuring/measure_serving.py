"""`picbench measure decode-load`, `load-report` and `scaling`: many requests at once."""

from typing import Any

import click

from picbench.cli.guard import GuardedCommand
from picbench.cli.measuring.measurement import COMMIT, DEVICE, LLAMA, ON_GPU, SECONDS, served_by
from picbench.engines.config import SHARED_DECODE

_MODEL = click.option(
    "--model", show_default=f"{LLAMA}, shape:tiny on a CPU", help="Who serves it."
)
_SHARED_DECODE = click.option(
    "--shared-decode",
    type=click.Choice(SHARED_DECODE),
    default="auto",
    show_default=True,
    help="For mepic's engine, as for picbench run.",
)
_ESTIMATE = click.option(
    "--estimate", is_flag=True, help="Say how long the rest takes; measure nothing."
)


@click.command(name="decode-load", cls=GuardedCommand)
@ON_GPU
@COMMIT
@DEVICE
@_MODEL
@click.option(
    "--sharing", is_flag=True, help="Measure over degrees of sharing instead, with a figure."
)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option(
    "--reply",
    type=click.IntRange(8),
    metavar="N",
    show_default="512, 32 for --sharing",
    help="Tokens in a reply.",
)
@SECONDS
@_ESTIMATE
def decode_load(
    *,
    device: str,
    model: str | None,
    reply: int | None,
    sharing: bool,
    estimate: bool,
    **options: Any,
) -> int:
    """Decoding of 64 requests of 32k tokens that share chunks, against stock vLLM.

    Rounds that are done are kept; other settings or another commit start over. Exit 4 if rounds
    are left.
    """
    from picbench.measure.serving import decode_load as measuring

    run = measuring.DecodeRun(
        reply=reply or 0, **served_by(device, model, on_cpu="shape:tiny"), **options
    )
    if estimate:
        click.echo(measuring.estimated(run, sharing=sharing))
        return 0
    return _shown(measuring.measure(run, click.echo, sharing=sharing))


@click.command(name="load-report", cls=GuardedCommand)
@ON_GPU
@COMMIT
@DEVICE
@_MODEL
@click.option(
    "--only",
    multiple=True,
    metavar="GROUP",
    show_default="all",
    help="share-nothing, 2wiki, mixed, cold, closed or rate; repeat the flag for more.",
)
@_SHARED_DECODE
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@SECONDS
@_ESTIMATE
def load_report(*, device: str, model: str | None, estimate: bool, **options: Any) -> int:
    """Loads of mepic and of stock vLLM, each with a server of its own, several times.

    Nothing shared, more requests than can be served, plain requests beside long prompts, cold
    prompts, a closed loop over corpora, rates. Cells that are done are kept; another commit starts
    over. Exit 4 if cells are left.
    """
    from picbench.measure.serving import load_report as measuring

    run = measuring.LoadRun(**served_by(device, model, on_cpu="shape:tiny"), **options)
    if estimate:
        click.echo(measuring.estimated(run))
        return 0
    return _shown(measuring.measure(run, click.echo))


@click.command(cls=GuardedCommand)
@ON_GPU
@COMMIT
@DEVICE
@_MODEL
@click.option(
    "--workers",
    type=click.IntRange(2),
    default=2,
    show_default=True,
    help="GPUs of the larger engine.",
)
@_SHARED_DECODE
@click.option(
    "--graph-tokens",
    type=click.IntRange(1),
    default=None,
    show_default="the engine's own",
    help="Largest step of mepic's engines with a CUDA graph.",
)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@SECONDS
@_ESTIMATE
def scaling(*, device: str, model: str | None, estimate: bool, **options: Any) -> int:
    """Throughput of an engine on several GPUs against one, and of stock vLLM.

    Rounds that are done are kept; another commit starts over. Exit 4 if rounds are left.
    """
    from picbench.measure.serving import scaling as measuring

    run = measuring.ScalingRun(**served_by(device, model, on_cpu="shape:tiny"), **options)
    if estimate:
        click.echo(measuring.estimated(run))
        return 0
    return _shown(measuring.measure(run, click.echo))


def _shown(measured: tuple[str, bool]) -> int:
    """Print the page of what is measured; the exit code by whether that is all."""
    page, whole = measured
    click.echo(page)
    return 0 if whole else 4
