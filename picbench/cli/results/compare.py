"""`picbench compare`: two runs, or two arms of one, sample by sample."""

import sys
from pathlib import Path

import click

from picbench.cli.guard import GuardedCommand
from picbench.cli.options import RangeOfNumbers


@click.command(cls=GuardedCommand)
@click.argument("before", metavar="RUN")
@click.argument("after", metavar="[RUN]", required=False)
@click.option(
    "--arms",
    metavar="BEFORE,AFTER",
    show_default="each arm with the arm of the same name; in one run, full with each other arm",
    help="Compare this arm of the first run with that arm of the second.",
)
@click.option(
    "--margin",
    type=RangeOfNumbers(0, 1, min_open=True),
    metavar="LOSS",
    help="The acceptable loss of score, from 0 to 1: say whether the loss is smaller, with 95 % "
    "confidence, and how many samples would decide it.",
)
@click.option(
    "--allow-mismatch",
    is_flag=True,
    help="Compare runs of different settings or requests anyway, and say so in the output.",
)
@click.option(
    "--format",
    "style",
    type=click.Choice(["text", "json", "markdown", "github"]),
    default="text",
    show_default=True,
    help="github: Markdown in the summary of the step.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="For resampling.")
def compare(
    *,
    before: str,
    after: str | None,
    arms: str | None,
    margin: float | None,
    allow_mismatch: bool,
    style: str,
    seed: int,
) -> int:
    """Compare two run directories, or two arms of one, sample by sample.

    Scores by differences, times by ratios, each with a 95 % interval over groups of samples that
    are not independent, and a p value adjusted for all tests made; counts exactly. Runs of other
    requests or settings are refused, with the fields that differ (exit 3).
    """
    from picbench.comparison.comparison_formats import FORMATS
    from picbench.comparison.run_comparison import (
        ComparisonSettings,
        compare_own_arms,
        compare_runs,
    )
    from picbench.output.github import write_step_summary
    from picbench.output.run_reader import read_run

    settings = ComparisonSettings(_two(arms), margin, allow_mismatch, seed)
    first = read_run(Path(before))
    if after is None:
        found = compare_own_arms(first, settings)
    else:
        found = compare_runs(first, read_run(Path(after)), settings)
    text = FORMATS[style](found)
    if style == "github":
        write_step_summary(text, sys.stdout)
    else:
        click.echo(text.rstrip("\n"))
    return 0


def _two(arms: str | None) -> tuple[str, str] | None:
    from picbench.errors import ConfigError

    if arms is None:
        return None
    names = [name.strip() for name in arms.split(",")]
    if len(names) != 2 or not all(names):
        raise ConfigError(f"`arms={arms}`: two arms are compared", hint="write full,mepic")
    return names[0], names[1]
