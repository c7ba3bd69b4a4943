"""`picbench report`: runs as one HTML file."""

from pathlib import Path

import click

from picbench.cli.guard import traced
from picbench.cli.options.shared_options import DEBUG, margin_option


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True)
@click.option(
    "--output",
    metavar="FILE",
    show_default="report.html, in the run's directory if there is one run",
    help="Where the page goes; a file that is there is replaced.",
)
@margin_option(0.02, "arms are judged by it.")
@DEBUG
def report(*, runs: tuple[str, ...], output: str | None, margin: float, debug: bool) -> None:
    """Write run directories as one HTML file, to be opened offline.

    Each run has a verdict, what to know before believing it, tables, figures, and the answers that
    differ from full's with their passages. Several runs also have an overview.
    """
    with traced(debug):
        from picbench.report.html_report import ReportSettings, write_report

        paths = [Path(run) for run in runs]
        folder = paths[0] if len(paths) == 1 else Path()
        file = Path(output) if output is not None else folder / "report.html"
        write_report(paths, file, ReportSettings(margin))
        click.echo(f"{file} ({file.stat().st_size / 1e6:.1f} MB)")
