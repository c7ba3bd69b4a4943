"""`picbench report`: runs as one HTML file."""

from pathlib import Path

import click

from picbench.cli.guard import GuardedCommand
from picbench.cli.options import FILE, RangeOfNumbers


@click.command(cls=GuardedCommand)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True)
@click.option(
    "--output",
    type=FILE,
    metavar="FILE",
    show_default="report.html, in the run's directory if there is one run",
    help="Where the page goes; an existing file is replaced.",
)
@click.option(
    "--margin",
    type=RangeOfNumbers(0, 1, min_open=True),
    metavar="LOSS",
    default=0.02,
    show_default=True,
    help="The acceptable loss of score, from 0 to 1, by which arms are judged.",
)
def report(*, runs: tuple[str, ...], output: Path | None, margin: float) -> None:
    """Write run directories as one HTML file, to be opened offline.

    Each run has a verdict, what to know before believing it, tables, figures, and the answers that
    differ from full's with their passages. Several runs also have an overview.
    """
    from picbench.report.html_report import ReportSettings, write_report

    paths = [Path(run) for run in runs]
    folder = paths[0] if len(paths) == 1 else Path()
    file = output if output is not None else folder / "report.html"
    write_report(paths, file, ReportSettings(margin))
    click.echo(f"{file} ({file.stat().st_size / 1e6:.1f} MB)")
