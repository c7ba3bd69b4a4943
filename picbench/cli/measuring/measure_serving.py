"""`picbench measure decode-load`, `load-report` and `scaling`: many requests at once."""

from typing import Any

import click

from picbench.cli.measuring.measurement import COMMIT, DEVICE, ON_GPU, MeasureCommand
from picbench.cli.options.shared_options import RangeOfNumbers
from picbench.engines.config import SHARED_DECODE

_MODEL = click.option(
    "--model", show_default="shape:llama-3.1-8b, shape:tiny on a CPU", help="Who serves it."
)
_SECONDS = click.option(
    "--seconds",
    type=RangeOfNumbers(0),
    default=0.0,
    metavar="S",
    show_default="no limit",
    help="Begin nothing that would not end within so many; the same command goes on.",
)
_SHARED_DECODE = click.option(
    "--shared-decode",
    type=click.Choice(SHARED_DECODE),
    default="auto",
    show_default=True,
    help="Of mepic's engine, as for picbench run.",
)
_ESTIMATE = click.option(
    "--estimate", is_flag=True, help="Say how long the rest takes; measure nothing."
)


@click.command(name="decode-load", cls=MeasureCommand)
@ON_GPU
@COMMIT
@DEVICE
@_MODEL
@click.option("--sharing", is_flag=True, help="Over degrees of sharing instead, with a figure.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option(
    "--reply",
    type=click.IntRange(8),
    metavar="N",
    show_default="512, 32 for --sharing",
    help="Tokens of a reply.",
)
@_SECONDS
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

    Rounds that are done are kept; other settings or another commit begin anew. Exit 4 if rounds
    are left.
    """
    from picbench.measure.serving import decode_load as measuring

    run = measuring.DecodeRun(
        model=_model(model, device),
        device=device,
        dtype=_dtype(device),
        reply=reply or 0,
        **options,
    )
    if estimate:
        click.echo(measuring.estimated(run, sharing=sharing))
        return 0
    page, whole = measuring.measure(run, click.echo, sharing=sharing)
    click.echo(page)
    return 0 if whole else 4


@click.command(name="load-report", cls=MeasureCommand)
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
@_SECONDS
@_ESTIMATE
def load_report(*, device: str, model: str | None, estimate: bool, **options: Any) -> int:
    """Loads of mepic and of stock vLLM, each with a server of its own, several times.

    Nothing shared, more requests than can be served, plain requests beside long prompts, cold
    prompts, a closed loop over corpora, rates. Cells that are done are kept; another commit begins
    anew. Exit 4 if cells are left.
    """
    from picbench.measure.serving import load_report as measuring

    run = measuring.LoadRun(
        model=_model(model, device), device=device, dtype=_dtype(device), **options
    )
    if estimate:
        click.echo(measuring.estimated(run))
        return 0
    page, whole = measuring.measure(run, click.echo)
    click.echo(page)
    return 0 if whole else 4


@click.command(cls=MeasureCommand)
@ON_GPU
@COMMIT
@DEVICE
@_MODEL
@click.option("--workers", type=click.IntRange(2), default=2, show_default=True, help="GPUs.")
@_SHARED_DECODE
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@_SECONDS
@_ESTIMATE
def scaling(*, device: str, model: str | None, estimate: bool, **options: Any) -> int:
    """Throughput of an engine on several GPUs against one, and of stock vLLM.

    Rounds that are done are kept; another commit begins anew. Exit 4 if rounds are left.
    """
    from picbench.measure.serving import scaling as measuring

    run = measuring.ScalingRun(
        model=_model(model, device), device=device, dtype=_dtype(device), **options
    )
    if estimate:
        click.echo(measuring.estimated(run))
        return 0
    page, whole = measuring.measure(run, click.echo)
    click.echo(page)
    return 0 if whole else 4


def _model(given: str | None, device: str) -> str:
    return given or ("shape:tiny" if device == "cpu" else "shape:llama-3.1-8b")


def _dtype(device: str) -> str:
    return "float32" if device == "cpu" else "bfloat16"
