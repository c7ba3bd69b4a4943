"""`picbench measure profile`: what a grid predicts of traces, against engines that serve them."""

from pathlib import Path

import click

from picbench.cli.guard import GuardedCommand
from picbench.cli.measuring.measurement import (
    CAVEAT,
    COMMIT,
    DEVICE,
    OWN_DTYPE,
    OWN_MODEL,
    PART,
    served_by,
)
from picbench.cli.options import FOLDER, RangeOfNumbers


@click.command(name="profile", cls=GuardedCommand)
@click.option("--grid", required=True, metavar="NAME|FILE", help="See picbench profile.")
@click.option("--calibration", metavar="FILE", help="See picbench profile.")
@click.option("--output", type=FOLDER, default=Path("runs/profile"), show_default=True)
@COMMIT
@DEVICE
@OWN_MODEL
@OWN_DTYPE
@click.option(
    "--seed", type=int, show_default="that of the results", help="What the traces are drawn with."
)
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True)
@click.option(
    "--seconds",
    type=RangeOfNumbers(0),
    default=0.0,
    metavar="S",
    show_default="no limit",
    help="Begin no repeat after the first that would not end within this time; the same command "
    "goes on.",
)
@PART
@CAVEAT
def profile_check(
    *,
    grid: str,
    calibration: str | None,
    output: Path,
    commit: str | None,
    device: str,
    model: str | None,
    dtype: str | None,
    seed: int | None,
    repeats: int,
    seconds: float,
    part: tuple[int, int],
    caveat: str,
) -> int:
    """Serve three traces that no grid has, and compare with what picbench profile predicts.

    Repeats that are done are kept. Exit 4 if repeats are left.
    """
    from picbench.errors import ConfigError
    from picbench.grid.measured_grid import choose_calibration, choose_grid
    from picbench.measure.break_even.checked_repeats import SEED
    from picbench.measure.break_even.measure_grid import GridRun
    from picbench.measure.break_even.profile_check import check_profile
    from picbench.profile.prediction.predictor import GridPredictor

    measured = choose_grid(grid)
    if measured is None:
        raise ConfigError(f"`grid` {grid}: nothing to check", hint="name a grid.json")
    run = GridRun(
        **served_by(device, model, dtype),
        seconds=seconds,
        output=output,
        commit=commit,
        caveat=caveat,
        part=part,
    )
    predictor = GridPredictor(measured, calibration=choose_calibration(calibration, measured))
    drawn = SEED if seed is None else seed
    _, done = check_profile(run, predictor, repeats, click.echo, drawn)
    click.echo(output / "profile.md")
    return 0 if done else 4
