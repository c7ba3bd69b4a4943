"""Commands that read run directories: compare, gate, baseline, rescore, report, show, table."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from picbench.cli.guard import CommandGroup, GuardedCommand, with_flags
from picbench.cli.options import FILE, options_of, style_of

REGRESSION, INCONCLUSIVE = 1, 5

_LOSS = click.FloatRange(1e-6, 1)
_RUNS = click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path())


@click.command(cls=GuardedCommand)
@click.argument("before", metavar="RUN", type=click.Path())
@click.argument("after", metavar="[RUN]", required=False, type=click.Path())
@options_of("picbench.settings:ComparisonSettings")
@style_of("text", "json", "markdown", "github", help="github: Markdown in the summary of the step.")
def compare(*, before: str, after: str | None, style: str, **given: Any) -> int:
    """Compare two run directories, or two arms of one, sample by sample.

    Scores by differences, times by ratios, each with a 95 % interval over groups of samples that
    are not independent, and a p value adjusted for all tests made; counts exactly. Runs of other
    requests or settings are refused, with the fields that differ (exit 3).
    """
    from picbench.compare.comparison import FORMATS, compare_own_arms, compare_runs
    from picbench.settings import ComparisonSettings
    from picbench.store.provenance import write_step_summary
    from picbench.store.reader import read_run

    settings = ComparisonSettings(**given)
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


@click.command(cls=GuardedCommand)
@click.argument("run", type=click.Path())
@click.option(
    "--baseline",
    required=True,
    metavar="FILE|NAME",
    type=click.Path(),
    help="What picbench baseline save wrote; a name is looked up in baselines/.",
)
@click.option(
    "--strict",
    is_flag=True,
    help="Exit with 5 for whatever is inconclusive: slow times and missing samples too.",
)
@style_of(
    "text",
    "json",
    "github",
    "junit",
    help="github: annotations, and a table in the summary of the step.",
)
def gate(*, run: str, baseline: str, strict: bool, style: str) -> int:
    """Check a run against a baseline, metric by metric.

    Counts have to be the same, scores may lose a margin on these requests, times may grow by a
    ratio; differences that chance explains are not regressions. Thresholds are in the baseline's
    file.

    \b
    Exits with 0 if nothing got worse, 1 if something did, 2 for wrong usage,
    3 if the run and the baseline cannot be compared,
    5 if a loss is beyond its margin and may be chance; with --strict, for all that is undecided.
    """
    from picbench.compare.baseline import read_baseline
    from picbench.compare.gate import FORMATS, GateVerdict, check_run, gate_markdown
    from picbench.store.provenance import write_step_summary
    from picbench.store.reader import read_run

    result = check_run(read_run(Path(run)), read_baseline(baseline), baseline)
    if text := FORMATS[style](result):
        click.echo(text)
    if style == "github":
        write_step_summary(gate_markdown(result), sys.stdout)
    if result.verdict is GateVerdict.REGRESSION:
        return REGRESSION
    unsure = result.found(GateVerdict.INCONCLUSIVE)
    return INCONCLUSIVE if any(strict or check.fails for check in unsure) else 0


@click.group(cls=CommandGroup)
def baseline() -> None:
    """Save runs for picbench gate to compare with, and list them."""


@baseline.command()
@_RUNS
@click.argument("name", metavar="NAME|FILE")
@click.option(
    "--keep-thresholds", is_flag=True, help="Keep the thresholds of the file that is replaced."
)
def save(*, runs: tuple[str, ...], name: str, keep_thresholds: bool) -> int:
    """Save runs of one workload as a baseline, with what pairing needs of every sample.

    Several runs show how much times drift and which counts repeat. A NAME is baselines/NAME.json; a
    FILE is JSON or YAML, and its thresholds can be edited. Prints the file.
    """
    from picbench.compare.baseline import (
        baseline_path,
        make_baseline,
        read_baseline,
        write_baseline,
    )
    from picbench.store.reader import read_run

    path = baseline_path(name)
    thresholds = read_baseline(name).thresholds if keep_thresholds else None
    write_baseline(path, make_baseline([read_run(Path(run)) for run in runs], thresholds))
    click.echo(path)
    return 0


@baseline.command(name="list")
def list_() -> int:
    """List the baselines in baselines/: when they were made, of what.

    Files that cannot be read are named on stderr, and the exit code is the last one's.
    """
    from picbench.compare.baseline import list_baselines, read_baseline
    from picbench.errors import PicBenchError

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


@click.command(cls=GuardedCommand)
@click.argument("run", metavar="RUN", type=click.Path())
@click.option(
    "--metric",
    type=click.Choice(
        ["f1", "em", "rouge-l", "string-match", "f1-zh", "rouge-l-zh"]
        + [f"{name}-cacheblend" for name in ("f1", "rouge-l")]
    ),
    show_default="the run's own, as this version computes it",
    help="Score replies by word F1, exact match, Rouge-L, RULER's string match, LongBench's for "
    "Chinese, or CacheBlend's F1 over token ids and Rouge-L over stemmed words.",
)
def rescore(*, run: str, metric: str | None) -> int:
    """Score the stored replies of a finished run again; nothing is generated.

    Rewrites samples.jsonl and summary.json, keeps the old ones as samples.1.jsonl, summary.1.json
    and so on, says what changed, and makes the run's tables and figures again.
    """
    from picbench.figures.run import write_run_files
    from picbench.run.result import rescore as score

    changed, kept = score(Path(run), metric)
    for name, arm in changed.items():
        before, after = arm.before, arm.after
        click.echo(
            f"{name}: {before.metric} {_mean(before.mean)}, now {after.metric} "
            f"{_mean(after.mean)}; {arm.scores} scores and {arm.outcomes} outcomes changed"
        )
    click.echo(f"kept: {', '.join(path.name for path in kept)}")
    for line in write_run_files(Path(run)):
        click.echo(line, err=True)
    return 0


def _mean(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


@click.command(cls=GuardedCommand)
@_RUNS
@click.option(
    "--output",
    type=FILE,
    metavar="FILE",
    show_default="report.html, in the run's directory if there is one run",
    help="Where the page goes; an existing file is replaced.",
)
@click.option(
    "--margin",
    type=_LOSS,
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
    from picbench.report.page import write_report

    paths = [Path(run) for run in runs]
    file = output or (paths[0] if len(paths) == 1 else Path()) / "report.html"
    write_report(paths, file, margin)
    click.echo(f"{file} ({file.stat().st_size / 1e6:.1f} MB)")


@click.command(cls=GuardedCommand)
@click.argument("run", metavar="RUN", type=click.Path())
@style_of("text", "json", help="json: the manifest and the summary, in the current schema.")
def show(*, run: str, style: str) -> int:
    """Print a run's state, table, settings, and the versions and hardware that it ran on."""
    from dataclasses import asdict

    from picbench.run.result import arms_of, print_overview
    from picbench.store.reader import read_run

    found = read_run(Path(run))
    if style == "text":
        worded = partial(with_flags, context=click.get_current_context())
        print_overview(found, sys.stdout, worded)
    else:
        arms = {name: asdict(arm) for name, arm in arms_of(found).items()}
        click.echo(json.dumps({"manifest": found.manifest, "arms": arms}, indent=2))
    return 0


@click.command(cls=GuardedCommand)
@_RUNS
@style_of(
    "markdown",
    "latex",
    "csv",
    help="The printed table's columns in Markdown or LaTeX, or all numbers of the summaries in "
    "CSV.",
)
def table(*, runs: tuple[str, ...], style: str) -> int:
    """Print the results of run directories as one table, an arm a line."""
    from picbench.store.reader import read_run
    from picbench.tables.run import TABLE_FORMATS

    found = [read_run(Path(run)) for run in runs]
    click.echo(TABLE_FORMATS[style](found), nl=False)
    return 0


@click.command(cls=GuardedCommand)
@_RUNS
@click.option(
    "--to", "tracker", required=True, type=click.Choice(["mlflow", "wandb"]), help="The tracker."
)
@click.option(
    "--project",
    default="picbench",
    show_default=True,
    metavar="NAME",
    help="MLflow's experiment, or W&B's project.",
)
def export(*, runs: tuple[str, ...], tracker: str, project: str) -> None:
    """Write run directories to MLflow or W&B: settings, and the metrics of each arm.

    \b
    MLFLOW_TRACKING_URI=http://mlflow:5000 picbench export runs/new --to mlflow

    Where the tracker is its own variables say; its package comes with picbench[mlflow] or
    picbench[wandb].
    """
    from picbench.report.export import TRACKERS
    from picbench.store.reader import read_run

    for found in [read_run(Path(run)) for run in runs]:
        click.echo(f"{found.path}: {TRACKERS[tracker](found, project)}")
