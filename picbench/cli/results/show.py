"""`picbench show`: what is in a run directory."""

import json
import sys
from pathlib import Path

import click

from picbench.cli.guard import traced
from picbench.cli.options.shared_options import DEBUG


@click.command()
@click.argument("run", metavar="RUN")
@click.option(
    "--format",
    "style",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="json: the manifest and the summary, in the schema of today.",
)
@DEBUG
def show(*, run: str, style: str, debug: bool) -> int:
    """Print a run's state, table, settings, and the versions and hardware that it ran on."""
    with traced(debug):
        from dataclasses import asdict

        from picbench.output.run_reader import read_run
        from picbench.output.store.overview import arms_of, print_overview

        found = read_run(Path(run))
        if style == "text":
            print_overview(found, sys.stdout)
        else:
            arms = {name: asdict(arm) for name, arm in arms_of(found).items()}
            click.echo(json.dumps({"manifest": found.manifest, "arms": arms}, indent=2))
        return 0
