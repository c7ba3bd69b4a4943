"""`picbench run`: the main job."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from picbench.cli.guard import GuardedCommand, exit_code, interruptible, with_flags
from picbench.cli.options import (
    DTYPE,
    FILE,
    QUIET,
    complete_algorithms,
    complete_datasets,
    complete_models,
    options_of,
)

if TYPE_CHECKING:
    from picbench.run.session import Services


@click.command(cls=GuardedCommand)
@options_of(
    "picbench.settings:RunConfig",
    bounds=False,
    algo={
        "default": ("full", "prefix", "mepic"),
        "required": False,
        "shell_complete": complete_algorithms,
    },
    dataset={"shell_complete": complete_datasets},
    model={"shell_complete": complete_models},
)
@QUIET
@click.option(
    "--dry-run",
    is_flag=True,
    help="Show what would run, with estimates of tokens, memory and time; start no engine.",
)
@click.pass_obj
def run(services: "Services | None", /, *, quiet: bool, dry_run: bool, **flags: Any) -> int:
    """Run the same requests through several algorithms and compare them.

    Each arm has an engine in a process of its own; the arms take turns on identical token ids.
    `full` and `prefix` run on stock vLLM. Prints a table and, as the last line of stdout, a
    line of JSON with the run directory, how the run ended, and each arm's main numbers. The
    directory also gets table.csv, table.md and figures of first tokens, memory and accuracy. A run
    that was stopped is resumed by the same command; see docs/runs.md.
    """
    from picbench.cli.dry_run import print_plan
    from picbench.run.job import prepare
    from picbench.run.progress import open_progress
    from picbench.run.result import print_result
    from picbench.run.session import Services, execute
    from picbench.settings import parse_config

    if flags["offline"]:
        os.environ["HF_HUB_OFFLINE"] = "1"  # For the libraries here and in the arms' processes.
    services = services or Services()
    job = prepare(parse_config(flags), services.load, services.memory)
    if dry_run:
        print_plan(job, sys.stdout)
        return 0
    total = job.requests
    with _reported(job.output):
        with interruptible(), open_progress(total, quiet=quiet) as progress:
            finished = execute(job, services.launch, progress)
        if not quiet:
            worded = partial(with_flags, context=click.get_current_context())
            print_result(job, finished.arms, sys.stdout, worded)
        for line in services.files(finished.path):
            click.echo(line, err=True)
        return _verdict(finished.failed, total)


@contextmanager
def _reported(path: Path) -> Iterator[None]:
    """End with a line of JSON about the run in `path`, if this command has begun or read it."""
    from picbench.errors import ConfigError

    try:
        yield
    except BaseException as error:
        if not isinstance(error, ConfigError):
            _report(path, exit_code(error))
        raise
    _report(path, 0)


def _report(path: Path, code: int) -> None:
    from picbench.run.overview import status_line
    from picbench.store.writer import MANIFEST

    if (path / MANIFEST).exists():
        click.echo(status_line(path, code))


def _verdict(failed: int, total: int) -> int:
    from picbench.errors import EngineError

    if failed:
        raise EngineError(
            f"{failed} of {total} requests failed", hint="see error in samples.jsonl, and logs/"
        )
    return 0


@click.command(cls=GuardedCommand)
@click.option(
    "--chunks",
    required=True,
    metavar="FILE",
    help='Chunks, one per line: {"text": "..."} or {"tokens": [1, 2, ...]}; for context=document '
    'with their documents: {"text": "...", "document": "..."}.',
)
@click.option(
    "--tiers",
    required=True,
    metavar="KIND[:PLACE]:SIZE,...",
    help="Where to put them; name a tier that other engines reach (disk, redis, ...).",
)
@click.option(
    "--algo",
    default="mepic",
    show_default=True,
    metavar="NAME[:OPTION=VALUE...]",
    help="The algorithm that will use them: how chunks are padded and what precedes them.",
)
@click.option("--prefix", metavar="TEXT", help="The text in front of chunks, for anchored=on.")
@click.option(
    "--model",
    default="testbed",
    show_default=True,
    metavar="testbed|PATH|ID|shape:NAME",
    help="As for picbench run; other weights never find these chunks.",
)
@click.option("--salt", metavar="TENANT", help="Whose requests may use the chunks.")
@DTYPE
def warm(*, chunks: str, **flags: Any) -> int:
    """Compile chunks and store their KV in tiers.

    Engines that serve the same weights with the same tiers then load these chunks instead of
    compiling them. Exits with 4 if a chunk was not stored.
    """
    from picbench.run.warm import read_chunks, warm_tiers

    return warm_tiers(read_chunks(Path(chunks)), sys.stdout, **flags)


@click.command(cls=GuardedCommand)
@click.option(
    "--output",
    "--out",
    "out",
    type=FILE,
    required=True,
    metavar="FILE",
    help="The request file to write.",
)
@click.option(
    "--preset",
    metavar="NAME",
    help="Settings of a paper's workload, in place of the defaults; see picbench list traffic. "
    "Flags on the command line take precedence.",
)
@options_of(
    "picbench.run.traffic_file:TrafficConfig",
    bounds=False,
    unset=True,
    seed={"default": 0, "show_default": True},
    model={"default": "testbed", "show_default": True},
)
def traffic(*, out: Path, preset: str | None, **flags: Any) -> int:
    """Draw requests that share chunks, and write them to a file for picbench run --requests.

    The same settings give the same file. Its facts (tokens, reuse, arrivals) go to stdout.
    """
    from dataclasses import asdict

    from picbench.papers.settings import find_preset
    from picbench.run.traffic_file import TrafficWriter, parse_traffic
    from picbench.workloads import models

    settings = find_preset(preset) if preset else {}
    given = {name: value for name, value in flags.items() if value is not None}
    config = parse_traffic({**settings, **given})
    written = TrafficWriter().write(out, config, models.resolve(config.model))
    for name, value in asdict(written.facts).items():
        shown = f"{value:,.4g}" if isinstance(value, float) else value
        click.echo(f"{name}: {'none' if value is None else shown}")
    if written.left_out:
        click.echo(f"left out, too long: {written.left_out}")
    click.echo(str(out))
    return 0
