"""`picbench doctor`: is this installation sound, and are its answers right?"""

import json

import click

from picbench.cli.guard import traced, with_flags
from picbench.cli.options.shared_options import DEBUG, DEVICE, dtype_option


@click.command()
@click.option(
    "--model",
    metavar="testbed|PATH|ID|shape:NAME",
    show_default="no self-check",
    help="Check the answers of engines with this model, in under a minute for small ones.",
)
@DEVICE
@dtype_option("Type of weights and KV; errors show best in float32.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@DEBUG
@click.pass_context
def doctor(
    context: click.Context,
    /,
    *,
    model: str | None,
    device: str,
    dtype: str,
    as_json: bool,
    debug: bool,
) -> int:
    """Say what is installed, whether it fits together, and what works on this machine.

    With --model, stock vLLM and picbench serve the same prompts one after the other, and the
    log-probabilities of their answers are compared: full recompute, chunks whose tokens are all
    linked, and a chunk in place of a prefix must give the same. The last line is the verdict; exits
    with 3 if it is not ok.
    """
    with traced(debug):
        from picbench.measure.diagnosis import diagnose
        from picbench.run.session import Services

        services: Services = context.obj or Services()
        found = diagnose(model, device, dtype, services.launch)
        text = json.dumps(found.document(), indent=1) if as_json else found.text()
        click.echo(with_flags(text, context))
        return 0 if found.ok else 3
