"""`picbench reproduce`: a paper's tables and figures."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from picbench.cli.guard import traced

if TYPE_CHECKING:
    from picbench.papers.paper_settings import Settings
    from picbench.run.session import Services


@click.command()
@click.argument("paper", metavar="PAPER", type=click.Choice(["mepic"]))
@click.option(
    "--figure",
    "figures",
    multiple=True,
    default=("all",),
    show_default=True,
    type=click.Choice(["all", "table1", "table2", "fig6", "fig7", "fig8"]),
    help="What to make; repeat the flag for more.",
)
@click.option(
    "--output",
    metavar="DIR",
    default="runs/mepic",
    show_default=True,
    help="Where runs, tables and figures go; what is complete in it is not run again.",
)
@click.option("--model", metavar="NAME", show_default="the settings'", help="See picbench run.")
@click.option("--requests", type=int, metavar="N", help="Requests of every point; fewer is faster.")
@click.option("--seeds", type=int, metavar="N", help="Take only the first N seeds of the settings.")
@click.option("--settings", metavar="FILE", help="Other loads, arms and pool, in YAML.")
@click.option("--debug", is_flag=True, help="Show tracebacks and the log of a failed engine.")
@click.pass_obj
def reproduce(
    services: "Services | None",
    /,
    *,
    paper: str,
    figures: Sequence[str],
    output: str,
    model: str | None,
    requests: int | None,
    seeds: int | None,
    settings: str | None,
    debug: bool,
) -> int:
    """Measure what a paper's tables and figures show, and set its printed values beside ours.

    Every point is a run directory below DIR/runs, so the same command goes on where it was
    stopped. Prints DIR/README.md, which has all tables and figures.
    """
    with traced(debug):
        from picbench.papers.paper_settings import read_settings

        found = read_settings(paper, Path(settings) if settings else None)
        changed = _changed(found, model, requests, seeds)
        return _reproduce(services, changed, figures, Path(output))


def _changed(
    settings: "Settings", model: str | None, requests: int | None, seeds: int | None
) -> "Settings":
    from picbench.papers.paper_settings import with_requests

    if requests is not None:
        settings = with_requests(settings, requests)
    changes = {
        "model": model or settings.model,
        "seeds": settings.seeds[: seeds or len(settings.seeds)],
    }
    return settings.model_copy(update=changes)


def _reproduce(
    services: "Services | None", settings: "Settings", figures: Sequence[str], output: Path
) -> int:
    from picbench.papers.reproduction import reproduce as run
    from picbench.run.progress import open_progress
    from picbench.run.session import Services

    page = run(settings, figures, output, services or Services(), open_progress)
    click.echo(page.read_text(encoding="utf-8"), file=sys.stdout)
    click.echo(page)
    return 0
