"""`picbench sweep`: a grid of runs."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from picbench.cli.guard import GuardedCommand, exit_code, interruptible, with_flags
from picbench.cli.options import OFFLINE, QUIET

if TYPE_CHECKING:
    from picbench.experiments.sweep import PlannedCell
    from picbench.experiments.sweep_run import SweepRun
    from picbench.run.session import Services


@click.command(cls=GuardedCommand)
@click.argument("file", metavar="FILE.yaml")
@click.option(
    "--output",
    metavar="DIR",
    show_default="runs/NAME",
    help="Folder for the cells' run directories and the table; complete cells are kept, stopped "
    "ones are resumed.",
)
@OFFLINE
@QUIET
@click.option(
    "--dry-run",
    is_flag=True,
    help="Show the cells with requests, tokens, memory and time; start no engine.",
)
@click.pass_obj
def sweep(
    services: "Services | None",
    /,
    *,
    file: str,
    output: str | None,
    offline: bool,
    quiet: bool,
    dry_run: bool,
) -> int:
    """Run every combination of the settings in FILE.yaml, each as picbench run would.

    The file has `base:`, settings of all cells, and `grid:`, a list of values for each setting that
    differs. Every cell is a run directory below DIR; DIR/sweep.csv and DIR/sweep.md have all of
    them, a row for each cell and arm. A cell that fails does not stop the others (exit 4). The same
    command resumes a sweep that was stopped. The last line of stdout is JSON; see docs/runs.md.
    """
    from picbench.experiments.sweep import expand, plan_sweep, read_sweep, with_shared_workloads
    from picbench.experiments.sweep_run import check_folder, print_sweep_plan
    from picbench.run.job import RUNS
    from picbench.run.session import Services

    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"  # For the libraries here and in the arms' processes.
    services = services or Services()
    settings = read_sweep(Path(file))
    folder = Path(output) if output else RUNS / settings.name
    cells = expand(Path(file), settings, folder, offline=offline)
    check_folder(folder)
    services = with_shared_workloads(cells, services, run=not dry_run)
    planned = list(plan_sweep(cells, services))
    if dry_run:
        print_sweep_plan(planned, sys.stdout)
        return 0
    return _run(services, settings.name, folder, planned, quiet=quiet)


def _run(
    services: "Services",
    name: str,
    folder: Path,
    planned: Sequence["PlannedCell"],
    *,
    quiet: bool,
) -> int:
    from picbench.experiments.sweep_run import SweepRun, open_sweep, sweep_markdown, write_sweep
    from picbench.files import hold
    from picbench.run.progress import open_progress

    cells = [plan.cell for plan in planned]
    open_sweep(name, cells, folder)
    worded = partial(with_flags, context=click.get_current_context())
    run = SweepRun(
        planned,
        services,
        partial(open_progress, quiet=quiet),
        lambda line: click.echo(f"picbench: {worded(line)}", err=True),
    )
    with hold(folder), _reported(folder, run):
        try:
            with interruptible():
                for _ in run:
                    write_sweep(name, run.results, folder)
        finally:
            write_sweep(name, run.results, folder)
        if not quiet:
            click.echo(sweep_markdown(name, run.results))
        _check_complete(folder, run)
    return 0


@contextmanager
def _reported(folder: Path, run: "SweepRun") -> Iterator[None]:
    """End with a line of JSON about a sweep, however it ends."""
    from picbench.experiments.sweep_run import sweep_line

    try:
        yield
    except BaseException as error:
        click.echo(sweep_line(folder, run.results, exit_code(error)))
        raise
    click.echo(sweep_line(folder, run.results, 0))


def _check_complete(folder: Path, run: "SweepRun") -> None:
    from picbench.errors import EngineError

    missed = [result for result in run.results if not result.complete]
    if missed:
        states = ", ".join(sorted({result.status for result in missed}))
        raise EngineError(
            f"{len(missed)} of {len(run.results)} cells are not complete ({states})",
            hint=f"see {folder / 'sweep.csv'}; the same command tries failed ones again, a partial "
            "or invalid one where its folder is gone",
        )
