"""`picbench show`: what is in a run directory."""

import json
import sys
from pathlib import Path

import click

from picbench.cli.guard import GuardedCommand


@click.command(cls=GuardedCommand)
@click.argument("run", metavar="RUN")
@click.option(
    "--format",
    "style",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="json: the manifest and the summary, in the current schema.",
)
def show(*, run: str, style: str) -> int:
    """Print a run's state, table, settings, and the versions and hardware that it ran on."""
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
