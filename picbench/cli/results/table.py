"""`picbench table`: the results of runs, as text for other programs."""

from pathlib import Path

import click

from picbench.cli.guard import traced
from picbench.cli.options.shared_options import DEBUG


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True)
@click.option(
    "--format",
    "style",
    type=click.Choice(["markdown", "latex", "csv"]),
    default="markdown",
    show_default=True,
    help="The printed table's columns in Markdown or LaTeX, or all numbers of the summaries in "
    "CSV.",
)
@DEBUG
def table(*, runs: tuple[str, ...], style: str, debug: bool) -> int:
    """Print the results of run directories as one table, an arm a line."""
    with traced(debug):
        from picbench.output.run_reader import read_run
        from picbench.output.tables.table_formats import TABLE_FORMATS

        found = [read_run(Path(run)) for run in runs]
        click.echo(TABLE_FORMATS[style](found), nl=False)
    return 0
