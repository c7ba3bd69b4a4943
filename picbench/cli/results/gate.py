"""`picbench gate` and `picbench baseline`: a run against one that was saved."""

import sys
from pathlib import Path

import click

from picbench.cli.guard import traced
from picbench.cli.options.shared_options import DEBUG

REGRESSION, INCONCLUSIVE = 1, 5


@click.command()
@click.argument("run")
@click.option(
    "--baseline",
    required=True,
    metavar="FILE|NAME",
    help="What picbench baseline save wrote; a name is looked up in baselines/.",
)
@click.option("--strict", is_flag=True, help="Exit with 5 if a check is inconclusive.")
@click.option(
    "--format",
    "style",
    type=click.Choice(["text", "json", "github", "junit"]),
    default="text",
    show_default=True,
    help="github: annotations, and a table in the summary of the step.",
)
@DEBUG
def gate(*, run: str, baseline: str, strict: bool, style: str, debug: bool) -> int:
    """Check a run against a baseline, metric by metric.

    Counts have to be the same, scores may lose less than a margin, times may grow by less than a
    ratio; differences that chance explains are not regressions. Thresholds are in the baseline's
    file.

    \b
    Exits with 0 if nothing got worse, 1 if something did, 2 for wrong usage,
    3 if the run and the baseline cannot be compared,
    5 under --strict if too few samples leave something open.
    """
    with traced(debug):
        from picbench.gate.baseline_file import read_baseline
        from picbench.gate.checks import GateVerdict, check_run
        from picbench.gate.gate_formats import FORMATS, gate_markdown
        from picbench.output.github import write_step_summary
        from picbench.output.run_reader import read_run

        result = check_run(read_run(Path(run)), read_baseline(baseline), baseline)
        if text := FORMATS[style](result):
            click.echo(text)
        if style == "github":
            write_step_summary(gate_markdown(result), sys.stdout)
        if result.verdict is GateVerdict.REGRESSION:
            return REGRESSION
        return INCONCLUSIVE if strict and result.verdict is GateVerdict.INCONCLUSIVE else 0


@click.group()
def baseline() -> None:
    """Save runs for picbench gate to compare with, and list them."""


@baseline.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True)
@click.argument("name", metavar="NAME|FILE")
@click.option(
    "--keep-thresholds",
    is_flag=True,
    help="Keep the thresholds of the file that is replaced.",
)
@DEBUG
def save(*, runs: tuple[str, ...], name: str, keep_thresholds: bool, debug: bool) -> int:
    """Save runs of one workload as a baseline, with what pairing needs of every sample.

    Several runs tell how much times drift and which counts repeat. A NAME is baselines/NAME.json; a
    FILE is JSON or YAML, and its thresholds can be edited. Prints the file.
    """
    with traced(debug):
        from picbench.gate.baseline import make_baseline
        from picbench.gate.baseline_file import baseline_path, read_baseline, write_baseline
        from picbench.output.run_reader import read_run

        path = baseline_path(name)
        thresholds = read_baseline(name).thresholds if keep_thresholds else None
        write_baseline(path, make_baseline([read_run(Path(run)) for run in runs], thresholds))
        click.echo(path)
        return 0


@baseline.command(name="list")
@DEBUG
def list_(*, debug: bool) -> int:
    """List the baselines in baselines/: when they were made, of what.

    Files that cannot be read are named on stderr, and the exit code is the last one's.
    """
    with traced(debug):
        from picbench.errors import PicBenchError
        from picbench.gate.baseline_file import list_baselines, read_baseline

        code = 0
        for name, path in list_baselines():
            try:
                found = read_baseline(str(path))
            except PicBenchError as error:
                code = error.exit_code
                click.echo(f"picbench: {error}", err=True)
                continue
            dataset = found.conditions.workload.get("config.dataset") or "requests"
            size = max((len(arm.samples) for arm in found.arms.values()), default=0)
            what = f"{dataset}, {size} samples, {', '.join(found.arms)}, runs: {found.runs}"
            click.echo(f"{name}  {found.made}  {what}")
        return code
