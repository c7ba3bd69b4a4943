"""`picbench measure decode-load`: many requests at once."""

from typing import Any

import click

from picbench.cli.measuring.measurement import COMMIT, DEVICE, ON_GPU, MeasureCommand

_MODEL = click.option(
    "--model", show_default="shape:llama-3.1-8b, shape:tiny on a CPU", help="Who serves it."
)
_SECONDS = click.option(
    "--seconds",
    type=click.FloatRange(0),
    default=0.0,
    metavar="S",
    help="Begin nothing that would not end within so many; the same command goes on [no limit].",
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
@click.option("--reply", type=click.IntRange(8), help="Tokens of a reply of the load [512].")
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


def _model(given: str | None, device: str) -> str:
    return given or ("shape:tiny" if device == "cpu" else "shape:llama-3.1-8b")


def _dtype(device: str) -> str:
    return "float32" if device == "cpu" else "bfloat16"
