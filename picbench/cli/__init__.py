"""The command line. Only click is imported here: help and listings must answer at once."""

from collections.abc import Mapping
from types import MappingProxyType

import click

from picbench.cli.guard import GuardedGroup
from picbench.cli.inspect import doctor, explain, listing, profile, selftest
from picbench.cli.measure import figures, measure, reproduce
from picbench.cli.results import baseline, compare, export, gate, report, rescore, show, table
from picbench.cli.run import run, sweep, traffic, warm
from picbench.cli.serve import route, serve

#: The commands in groups, each with an example; "- " marks one for rare occasions.
_COMMANDS: Mapping[str, Mapping[click.Command, str]] = {
    "Decide": {
        profile: "picbench profile log.jsonl",
        explain: "picbench explain mepic --chunks 4",
        listing: "picbench list algorithms",
    },
    "Measure": {
        run: "picbench run --algo mepic --dataset musique --reuse 0.9",
        sweep: "picbench sweep grid.yaml",
        traffic: "picbench traffic --output requests.jsonl --dataset musique --chunks 16",
    },
    "Judge": {
        show: "picbench show runs/mine",
        compare: "picbench compare runs/mine runs/other",
        report: "picbench report runs/mine",
        baseline: "picbench baseline save runs/mine main",
        gate: "picbench gate runs/new --baseline main",
        table: "- picbench table runs/mine runs/other --format csv",
        rescore: "- picbench rescore runs/mine --metric em",
        export: "- picbench export runs/mine --to mlflow",
    },
    "Serve": {
        serve: "picbench serve smollm2 --parts documents",
        doctor: "picbench doctor --model testbed",
        warm: "- picbench warm --chunks chunks.jsonl --tiers disk:/var/kv:10GiB",
        route: "- picbench route --server http://a:8000 tcp://a:5557 tcp://a:5558",
    },
    "Develop": {
        measure: "picbench measure decode",
        reproduce: "picbench reproduce mepic --dry-run",
        selftest: "- picbench selftest --limit 40",
        figures: "- picbench figures mepic",
    },
}


class MainGroup(GuardedGroup):
    """All commands, in their groups."""

    sections = MappingProxyType(
        {
            title: tuple((str(command.name), text.startswith("- ")) for command, text in of.items())
            for title, of in _COMMANDS.items()
        }
    )


@click.group(cls=MainGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="picbench", message="%(prog)s %(version)s")
def main() -> None:
    """Measure position-independent KV caching inside vLLM, side by side.

    \b
    Exit codes: 0 ok, 1 regression, 2 wrong usage or configuration,
    3 invalid or incomparable runs, 4 partial results or a failed engine,
    5 inconclusive, 70 a bug in picbench, 130 interrupted, 141 output closed.
    """


for _examples in _COMMANDS.values():
    for _command, _example in _examples.items():
        _command.epilog = f"Example: {_example.removeprefix('- ')}"
        main.add_command(_command)
