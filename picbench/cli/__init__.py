"""The command line. Only click is imported here: help and listings must answer at once."""

import click

from picbench.cli.doctor import doctor
from picbench.cli.explain import explain
from picbench.cli.guard import GuardedGroup
from picbench.cli.listing import listing
from picbench.cli.measuring.measure import measure
from picbench.cli.profile import profile
from picbench.cli.reproduce import figures, reproduce
from picbench.cli.results.compare import compare
from picbench.cli.results.gate import baseline, gate
from picbench.cli.results.rescore import rescore
from picbench.cli.results.run_report import report
from picbench.cli.results.show import show
from picbench.cli.results.table import table
from picbench.cli.run import run
from picbench.cli.selftest import selftest
from picbench.cli.sweep import sweep
from picbench.cli.traffic import traffic
from picbench.cli.warm import warm


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
