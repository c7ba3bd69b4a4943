"""`picbench measure break-even`: where chunks pay, over a grid of traffic."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from picbench.cli.measuring.measurement import COMMIT, DEVICE, FOLDER, PART, MeasureCommand
from picbench.cli.options.shared_options import RangeOfNumbers

if TYPE_CHECKING:
    from picbench.profile.prediction.predictor import PredictorErrors


@click.command(name="break-even", cls=MeasureCommand)
@click.option(
    "--output", type=FOLDER, default=Path("results/break_even"), show_default=True, help="Goes on."
)
@COMMIT
@DEVICE
@click.option(
    "--model", show_default="shape:llama-3.1-8b, the testbed on a CPU", help="Who serves it."
)
@click.option(
    "--dtype",
    type=click.Choice(("float32", "bfloat16")),
    show_default="bfloat16, float32 on a CPU",
    help="Type of weights and KV.",
)
@click.option(
    "--seconds",
    type=RangeOfNumbers(0),
    default=0.0,
    metavar="S",
    show_default="no limit",
    help="Begin nothing that would not end within so many; the same command goes on.",
)
@click.option("--caveat", default="", metavar="TEXT", help="What readers must know of the figures.")
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
    """Serve a grid of traffic under full, prefix, reorder and mepic, on a CPU also under naive.

    Reuse, chunks, their length, the corpus, arrivals, cold and warm caches, three seeds. Exit 4 if
    cells are left.
    """
    from picbench.grid.measured_grid import read_grid
    from picbench.measure.break_even import measure_grid as measuring
    from picbench.measure.break_even.break_even_page import write_page
    from picbench.profile.prediction.predictor import GridPredictor

    on_cpu = device == "cpu"
    run = measuring.GridRun(
        model=model or ("testbed" if on_cpu else "shape:llama-3.1-8b"),
        device=device,
        dtype=dtype or ("float32" if on_cpu else "bfloat16"),
        output=output,
        **options,
    )
    if dry_run:
        click.echo(measuring.estimate(run))
        return 0
    done = None if page else measuring.measure_grid(run, click.echo)
    grid = read_grid(run.path)
    errors = GridPredictor(grid).errors()
    write_page(grid, output, ["## How well it interpolates", *_notes(errors)])
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
