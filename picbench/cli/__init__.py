"""The command line. Only click is imported here: help and listings must answer at once."""

import click

from picbench.cli.guard import GuardedGroup
from picbench.cli.inspect import doctor, explain, listing, profile, selftest
from picbench.cli.measure import figures, measure, reproduce
from picbench.cli.results import baseline, compare, export, gate, report, rescore, show, table
from picbench.cli.run import run, sweep, traffic, warm
from picbench.cli.serve import route, serve


@click.group(cls=GuardedGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="picbench", message="%(prog)s %(version)s")
def main() -> None:
    """Measure position-independent KV caching inside vLLM, side by side.

    \b
    Exit codes: 0 ok, 1 regression, 2 wrong usage or configuration,
    3 invalid or incomparable runs, 4 partial results or a failed engine,
    5 inconclusive, 70 a bug in picbench, 130 interrupted, 141 its output was closed.
    """


for command in (
    *(run, sweep, compare, gate, baseline, show, report, rescore, traffic, warm, profile, table),
    *(reproduce, figures, measure, explain, listing, doctor, selftest, serve, route, export),
):
    main.add_command(command)
