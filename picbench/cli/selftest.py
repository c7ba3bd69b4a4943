"""`picbench selftest`: does the harness notice what it should, and nothing else?"""

import json
from typing import TYPE_CHECKING, Any

import click

from picbench.cli.guard import traced
from picbench.cli.options.shared_options import DEBUG, DEVICE, dtype_option

if TYPE_CHECKING:
    from picbench.run.session import Services

FAILED = 3


@click.command()
@click.option(
    "--limit", type=click.IntRange(2), default=40, show_default=True, metavar="N", help="Requests."
)
@click.option(
    "--dataset",
    default="musique",
    show_default=True,
    metavar="NAME",
    help="See picbench list datasets.",
)
@click.option(
    "--model",
    default="testbed",
    show_default=True,
    metavar="testbed|PATH|ID",
    help="A model that can answer the data set's questions.",
)
@click.option(
    "--data",
    default="bundled",
    show_default=True,
    metavar="bundled|DIR|FILE|hub",
    help="Rows, as for picbench run.",
)
@DEVICE
@dtype_option("Type of weights and KV.")
@click.option("--output", metavar="DIR", help="Run directory; new or empty.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@DEBUG
@click.pass_obj
def selftest(services: "Services | None", /, *, as_json: bool, debug: bool, **flags: Any) -> int:
    """Run negative controls: comparisons whose outcome is known.

    Full recompute must not differ from itself, reuse without recomputation must lose score, and
    chunks with the KV of other chunks must lose nearly all of it. Prints what was expected and
    found; exits with 3 if a control failed, because then no other number here means anything.
    """
    with traced(debug):
        from dataclasses import asdict

        from picbench.run.config import parse_config
        from picbench.run.progress import open_progress
        from picbench.run.session import Services
        from picbench.selftest.negative_controls import prepare_controls, run_controls

        services = services or Services()
        # Requests alone in their round: what one round has in common is not in the way.
        config = parse_config({**flags, "algo": ("full",), "concurrency": 1})
        job = prepare_controls(config, services)
        with open_progress(job.requests) as progress:
            path, controls = run_controls(job, services, progress)
        passed = all(control.passed for control in controls)
        if as_json:
            found = [asdict(control) for control in controls]
            click.echo(json.dumps({"passed": passed, "run": str(path), "controls": found}))
            return 0 if passed else FAILED
        for control in controls:
            verdict = "ok" if control.passed else "FAILED"
            click.echo(f"{verdict:6}  {control.name}: {control.found} ({control.expected})")
        click.echo(path)
        return 0 if passed else FAILED
