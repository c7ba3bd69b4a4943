"""`picbench rescore`: scores of a finished run anew, without an engine."""

from pathlib import Path

import click

from picbench.cli.guard import traced
from picbench.cli.options.shared_options import DEBUG


@click.command()
@click.argument("run", metavar="RUN")
@click.option(
    "--metric",
    type=click.Choice(["f1", "em", "rouge-l", "f1-cacheblend", "rouge-l-cacheblend"]),
    show_default="the run's own, as picbench computes it today",
    help="Score replies by word F1, exact match, Rouge-L, or CacheBlend's F1 over token ids and "
    "Rouge-L over stemmed words.",
)
@DEBUG
def rescore(*, run: str, metric: str | None, debug: bool) -> int:
    """Score the stored replies of a finished run again; nothing is generated.

    Rewrites samples.jsonl and summary.json, keeps the old ones as samples.1.jsonl, summary.1.json
    and so on, says what changed, and makes the run's tables and figures anew.
    """
    with traced(debug):
        from picbench.inputs.rescoring import rescore as score
        from picbench.output.tables.run_files import write_run_files

        found = score(Path(run), metric)
        for name, arm in found.arms.items():
            before, after = arm.before, arm.after
            click.echo(
                f"{name}: {before.metric} {_mean(before.mean)}, now {after.metric} "
                f"{_mean(after.mean)}; {arm.scores} scores and {arm.outcomes} outcomes changed"
            )
        click.echo(f"kept: {', '.join(path.name for path in found.kept)}")
        for line in write_run_files(Path(run)):
            click.echo(line, err=True)
        return 0


def _mean(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
