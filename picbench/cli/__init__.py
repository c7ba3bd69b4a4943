"""The command line. Only click is imported here: help and listings must answer at once."""

import click

from picbench.cli.guard import GuardedGroup
from picbench.cli.inspect import doctor, explain, listing, selftest
from picbench.cli.measure import measure
from picbench.cli.profile import profile
from picbench.cli.reproduce import figures, reproduce
from picbench.cli.results import baseline, compare, gate, report, rescore, show, table
from picbench.cli.run import run, traffic, warm
from picbench.cli.sweep import sweep


@click.group(cls=GuardedGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="picbench", message="%(prog)s %(version)s")
def main() -> None:
    """Measure position-independent KV caching inside vLLM, side by side.

    \b
    Exit codes: 0 ok, 1 regression, 2 wrong usage or configuration,
    3 invalid or incomparable runs, 4 partial results or a failed engine,
    5 inconclusive, 70 a bug in picbench, 130 interrupted, 141 its output was closed.
    """


main.add_command(run)
main.add_command(sweep)
main.add_command(compare)
main.add_command(gate)
main.add_command(baseline)
main.add_command(show)
main.add_command(report)
main.add_command(rescore)
main.add_command(traffic)
main.add_command(warm)
main.add_command(profile)
main.add_command(table)
main.add_command(reproduce)
main.add_command(figures)
main.add_command(measure)
main.add_command(explain)
main.add_command(listing)
main.add_command(doctor)
main.add_command(selftest)
