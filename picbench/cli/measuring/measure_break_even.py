"""`picbench measure break-even`: where chunks pay, over a grid of traffic."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from picbench.cli.guard import GuardedCommand
from picbench.cli.measuring.measurement import (
    CAVEAT,
    COMMIT,
    DEVICE,
    OWN_DTYPE,
    OWN_MODEL,
    PART,
    SECONDS,
    served_by,
)
from picbench.cli.options import FOLDER

if TYPE_CHECKING:
    from picbench.profile.prediction.predictor import PredictorErrors


@click.command(name="break-even", cls=GuardedCommand)
@click.option(
    "--output",
    type=FOLDER,
    default=Path("results/break_even"),
    show_default=True,
    help="Folder to write to; a stopped measurement continues there.",
)
@COMMIT
@DEVICE
@OWN_MODEL
@OWN_DTYPE
@SECONDS
@CAVEAT
@PART
@click.option("--dry-run", is_flag=True, help="Say what is left to do and how long it may take.")
@click.option("--page", is_flag=True, help="Only make tables and figures of what is measured.")
def break_even(
    *,
    output: Path,
    device: str,
    model: str | None,
    dtype: str | None,
    dry_run: bool,
    page: bool,
    **options: Any,
) -> int:
    """Serve a grid of traffic under full, prefix, reorder, mepic, and naive: on a GPU small steps.

    Reuse, chunks, their length, the corpus, arrivals, cold and warm caches, three seeds, in stages
    of which each leaves a grid that is of use. Exit 4 if cells are left.
    """
    from picbench.grid.measured_grid import read_grid
    from picbench.measure.break_even import measure_grid as measuring
    from picbench.measure.break_even.break_even_page import write_page
    from picbench.measure.break_even.stage_errors import stage_errors
    from picbench.profile.prediction.predictor import GridPredictor

    run = measuring.GridRun(
        **served_by(device, model, dtype),
        output=output,
        **options,
    )
    if dry_run:
        click.echo(measuring.estimate(run))
        return 0
    done = None if page else measuring.measure_grid(run, click.echo)
    grid = read_grid(run.path)
    errors = GridPredictor(grid).errors()
    notes = [*_notes(errors), stage_errors(grid, run.settings)]
    write_page(grid, output, ["## How well it interpolates", *notes])
    if done is None:
        return 0
    click.echo(done)
    return 0 if done.done == done.total else 4


def _notes(errors: "PredictorErrors") -> Iterator[str]:
    yield (
        "Error of what `picbench profile` predicts for each traffic from all others: TTFT of "
        f"requests alone: {errors.ttft or 'too few points'}; requests a second in bursts: "
        f"{errors.requests_s or 'too few points'}."
    )
    yield "The same of grids that end after a stage, and their crossings beside the whole one's:"
