"""`picbench doctor`: is this installation sound, and are its answers right?"""

import json

import click

from picbench.cli.guard import GuardedCommand, with_flags
from picbench.cli.options import AS_JSON, DEVICE, DTYPE


@click.command(cls=GuardedCommand)
@click.option(
    "--model",
    metavar="testbed|PATH|ID|shape:NAME",
    show_default="no self-check",
    help="Check the answers of engines with this model; under a minute for small models.",
)
@DEVICE
@DTYPE
@AS_JSON
@click.pass_context
def doctor(
    context: click.Context,
    /,
    *,
    model: str | None,
    device: str,
    dtype: str,
    as_json: bool,
) -> int:
    """Say what is installed, whether it fits together, and what works on this machine.

    With --model, stock vLLM and picbench serve the same prompts one after the other, and the
    log-probabilities of their answers are compared: full recompute, chunks whose tokens are all
    linked, and a chunk in place of a prefix must give the same. Errors show best in float32. The
    last line is the verdict; exits with 3 if it is not ok.
    """
    from picbench.measure.diagnosis import diagnose
    from picbench.run.session import Services

    services: Services = context.obj or Services()
    found = diagnose(model, device, dtype, services.launch)
    text = json.dumps(found.document(), indent=1) if as_json else found.text()
    click.echo(with_flags(text, context))
    return 0 if found.ok else 3
