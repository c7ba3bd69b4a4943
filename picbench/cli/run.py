"""Commands that measure workloads, or prepare them: run, sweep, traffic, warm."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from picbench.cli.guard import GuardedCommand, exit_code, interruptible, with_flags
from picbench.cli.options import DTYPE, FILE, OFFLINE, QUIET, complete, options_of, own_values

if TYPE_CHECKING:
    from picbench.experiments.sweep import SweepCell
    from picbench.run.job import Job
    from picbench.run.session import Services
    from picbench.store.summary import ArmSummary

#: Settings that a dry run tells as they are, and what stands for those that are not given.
_TOLD = (
    *("dataset", "data", "columns", "reuse", "seed", "concurrency", "dtype", "device"),
    *("tensor_parallel", "eager", "on_bad_row", "prompts", "scoring", "drop"),
)
_UNSET = {
    "columns": "LongBench's",
    "prompts": "picbench's own",
    "reuse": "of the rows as they come",
}


@click.command(cls=GuardedCommand)
@options_of(
    "picbench.settings:RunConfig",
    bounds=False,
    algo={"required": False, "shell_complete": complete("picbench.engines.algorithms:names")},
    dataset={"shell_complete": complete("picbench.workloads.datasets:describe")},
    model={"shell_complete": complete("picbench.workloads.models:describe", "dir")},
)
@click.option(
    "--only",
    is_flag=True,
    help="Run the arms of --algo alone, without full and prefix beside them.",
)
@click.option(
    "--config",
    type=click.Path(dir_okay=False),
    metavar="FILE.yaml",
    help="Take settings from a file, such as dataset: musique; flags take precedence.",
)
@QUIET
@click.option(
    "--dry-run",
    is_flag=True,
    help="Show what would run, with estimates of tokens, memory and time; start no engine.",
)
@click.pass_obj
def run(
    services: "Services | None",
    /,
    *,
    only: bool,
    config: str | None,
    quiet: bool,
    dry_run: bool,
    **flags: Any,
) -> int:
    """Run the same requests through several algorithms and compare them.

    Each arm has an engine in a process of its own; the arms take turns on identical token ids.
    full and prefix, on stock vLLM, are beside the arms that are named. Prints a table, and to a
    terminal what it means; elsewhere the last line of stdout is JSON with the run directory, how
    the run ended, and each arm's main numbers. The directory also gets table.csv, table.md and
    figures. A run that was stopped is resumed by the same command; see docs/runs.md.
    """
    from picbench.figures.run import write_run_files
    from picbench.run.job import prepare
    from picbench.run.result import low_reuse, print_result
    from picbench.run.schedule import Progress
    from picbench.run.session import Services, execute
    from picbench.settings import parse_config

    if config is not None:
        from picbench.experiments.sweep import read_config

        given = read_config(Path(config))
        flags |= given | own_values(click.get_current_context(), given)
    if flags["offline"]:
        os.environ["HF_HUB_OFFLINE"] = "1"  # For the libraries here and in the arms' processes.
    flags["algo"] = with_baselines(flags["algo"], alone=only, remote=bool(flags["arm"]))
    services = services or Services()
    worded = partial(with_flags, context=click.get_current_context())
    job = prepare(parse_config(flags), services.load, services.memory)
    if dry_run:
        print_plan(job, sys.stdout, worded)
        return 0
    total = job.requests
    progress = Progress(total, None if quiet else sys.stderr)
    for line in map(worded, low_reuse(job)):
        progress.say(line)
    with reported(partial(_status, job.output), quiet=quiet):
        with interruptible():
            arms = execute(job, services.launch, progress)
        if not quiet:
            print_result(job, arms, sys.stdout, worded)
        for line in (services.files or write_run_files)(job.output):
            click.echo(line, err=True)
        _check_served(arms, total)
        return 0


def _check_served(arms: "Mapping[str, ArmSummary]", total: int) -> None:
    """Raise InvalidRun for arms that ignored their chunks, EngineError for requests that failed."""
    from picbench.errors import EngineError, InvalidRun

    if ignored := [name for name, arm in arms.items() if arm.without_reuse]:
        raise InvalidRun(
            f"`arm` {', '.join(ignored)}: served without reuse: chunks were ignored",
            hint="serve with picbench and `--enable-prompt-tokens-details`, or without `algo=`",
        )
    if failed := sum(arm.failed for arm in arms.values()):
        raise EngineError(
            f"{failed} of {total} requests failed", hint="see error in samples.jsonl, and logs/"
        )


def with_baselines(algo: Sequence[str], *, alone: bool, remote: bool) -> tuple[str, ...]:
    """The arms of a run: those that are named, after `full` and `prefix` unless `alone`.

    None is added, and none is needed, beside `remote` servers.
    """
    named = [name.strip() for value in algo for name in value.split(",")]
    missing = [name for name in ("full", "prefix") if name not in named]
    return (*([] if alone or remote else missing), *(algo or (() if remote else ("mepic",))))


def print_plan(job: "Job", stream: TextIO, worded: Callable[[str], str] = str) -> None:
    """What a run would do: arms, settings, requests, sizes."""
    from picbench.run.result import fact_table, print_all

    heading = "dry run: no engine was started, nothing was written"
    print_all(stream, heading, fact_table((name, worded(value)) for name, value in _plan(job)))


def _plan(job: "Job") -> Iterator[tuple[str, str]]:
    """(name, value) of everything that a dry run tells."""
    from picbench.run.result import load_of, low_reuse, skipped_rows

    facts, sizes = job.facts, job.sizes
    for arm in job.arms:
        where = "stock vLLM" if arm.stock else "the PIC engine"
        yield "arm", f"{arm.name} on {arm.algorithm if arm.endpoint else where}"
    yield "model", job.workload.model.label
    for name in _TOLD:
        yield f"--{name.replace('_', '-')}", _setting(name, getattr(job.config, name))
    if job.config.requests:
        yield "--requests", job.config.requests
    yield "chat template", "around prompts" if job.workload.chat else "none"
    yield from (("rows", line) for line in skipped_rows(job))
    yield "requests", f"{facts.samples} to each of {len(job.arms)} arms"
    yield "load", load_of(job)
    yield "repeats", str(job.config.repeats)
    yield "cache", job.config.cache or "kept between requests"
    yield "preloaded", f"{len(job.workload.preload)} chunks"
    yield "prompt tokens", f"{facts.mean_tokens:,.0f} mean, {facts.max_tokens:,} longest"
    yield "output tokens", f"{max(s.max_tokens for s in job.workload.samples):,} at most"
    yield "chunks", f"{facts.chunks:,}, {facts.unique_chunks:,} distinct"
    yield "reusable", f"{facts.reuse:.1%} of prompt tokens are in a chunk seen before"
    yield "truncated", f"{facts.truncated} of {facts.samples} prompts"
    yield "context", f"{sizes.context:,} tokens"
    yield (
        "KV blocks",
        f"{sizes.pool:,} in the pool; the longest request needs {sizes.longest:,}, "
        f"all distinct chunks {sizes.chunks:,}",
    )
    yield from _estimates(job)
    yield from (("note", note) for note in (*job.notes, *low_reuse(job)))
    yield "fingerprint", job.fingerprint
    yield "output", f"{job.output}{_state(job.output)}"


def _estimates(job: "Job") -> Iterator[tuple[str, str]]:
    from picbench.experiments.sweep import estimate_time, pool_bytes, tokens_of_arm
    from picbench.run.job import RUNS
    from picbench.run.schedule import minutes
    from picbench.tables.run import gib

    prompt, output = (count * len(job.arms) for count in tokens_of_arm(job))
    yield (
        "all tokens",
        f"{prompt:,} of prompts, {output:,} of replies at most, over all arms and repeats",
    )
    pools = pool_bytes(job)
    yield "KV memory", "not known" if pools is None else f"{gib(pools)} GiB, all pools"
    seconds, runs = estimate_time(job, RUNS)
    if seconds is None:
        yield "time", f"not known: no run of this model with these settings here in {RUNS}/"
    else:
        yield (
            "time",
            f"{minutes(seconds)} (minutes:seconds), as arms took for a prompt token in earlier "
            f"runs ({runs}); starts of engines are not in it",
        )


def _state(output: Path) -> str:
    """What a run would do with a directory that is there."""
    from picbench.store.reader import read_run
    from picbench.store.writer import FINAL, MANIFEST

    if not (output / MANIFEST).exists():
        return ""
    status = read_run(output).manifest["status"]
    return (
        f" ({status}: would only be shown)" if status in FINAL else f" ({status}: would be resumed)"
    )


def _setting(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return _UNSET.get(name, "none") if value is None else str(value)


@contextmanager
def reported(line: Callable[[int], str | None], *, quiet: bool = False) -> Iterator[None]:
    """End with a line of JSON, made of the exit code; None is no line.

    A terminal gets one only if it gets nothing else (`quiet`).
    """
    code = 0
    try:
        yield
    except BaseException as error:
        code = exit_code(error)
        raise
    finally:
        if (quiet or not sys.stdout.isatty()) and (text := line(code)):
            click.echo(text)


def _status(path: Path, code: int) -> str | None:
    """The line about the run in `path`, if this command has begun or read it."""
    from picbench.errors import ConfigError
    from picbench.run.result import status_line
    from picbench.store.writer import MANIFEST

    if isinstance(sys.exception(), ConfigError) or not (path / MANIFEST).exists():
        return None
    return status_line(path, code)


@click.command(cls=GuardedCommand)
@options_of("picbench.settings:WarmConfig")
@DTYPE
def warm(*, dtype: str, **flags: Any) -> int:
    """Compile chunks and store their KV in tiers.

    Engines that serve the same weights with the same tiers then load these chunks instead of
    compiling them. Exits with 4 if a chunk was not stored.
    """
    from picbench.run.traffic_file import warm_tiers
    from picbench.settings import WarmConfig

    return warm_tiers(WarmConfig(**flags), dtype, sys.stdout)


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
    "picbench.settings:TrafficConfig",
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
    written = TrafficWriter().write(out, config, models.resolve(config.model, weights=False))
    for name, value in asdict(written.facts).items():
        shown = f"{value:,.4g}" if isinstance(value, float) else value
        click.echo(f"{name}: {'none' if value is None else shown}")
    if written.left_out:
        click.echo(f"left out, too long: {written.left_out}")
    click.echo(str(out))
    return 0


@click.command(cls=GuardedCommand)
@click.argument("file", metavar="FILE.yaml", type=click.Path())
@click.option(
    "--output",
    type=click.Path(file_okay=False),
    metavar="DIR",
    show_default="runs/NAME",
    help="Folder for the cells' run directories and the table; complete cells are kept, stopped "
    "ones are resumed.",
)
@click.option(
    "--on",
    "cluster",
    metavar="ADDRESS",
    show_default="this machine, one cell after the other",
    help="Run cells on a Ray cluster, each alone on a node or its GPUs: auto, ray://HOST:10001.",
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
    cluster: str | None,
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
    from picbench.experiments.sweep import (
        check_folder,
        expand,
        load_once,
        print_sweep_plan,
        read_sweep,
        run_sweep,
    )
    from picbench.run.job import RUNS
    from picbench.run.schedule import Progress
    from picbench.run.session import Services

    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"  # For the libraries here and in the arms' processes.
    services = services or Services()
    settings = read_sweep(Path(file))
    folder = Path(output) if output else RUNS / settings.name
    cells = expand(Path(file), settings, folder, offline=offline)
    check_folder(folder)
    here = replace(services, load=load_once(services.load))
    for cell in cells:
        # What runs elsewhere is planned there: this machine may have neither GPUs nor the model.
        cell.read() if cluster and not dry_run else cell.plan(here)
    if dry_run:
        print_sweep_plan(cells, sys.stdout)
        return 0
    if cluster:
        from picbench.experiments.cluster import run_on_ray

        running = partial(run_on_ray, cells, cluster, services)
    else:
        stream = None if quiet else sys.stderr
        running = partial(run_sweep, cells, here, partial(Progress, stream=stream))
    return _run_sweep(running, settings.name, folder, cells, quiet=quiet)


def _run_sweep(
    running: "Callable[..., Iterator[SweepCell]]",
    name: str,
    folder: Path,
    cells: Sequence["SweepCell"],
    *,
    quiet: bool,
) -> int:
    from picbench.experiments.sweep import open_sweep, sweep_line, sweep_markdown, write_sweep
    from picbench.store.writer import hold

    open_sweep(name, cells, folder)
    worded = partial(with_flags, context=click.get_current_context())
    ended = running(say=lambda line: click.echo(f"picbench: {worded(line)}", err=True))
    with hold(folder), reported(lambda code: sweep_line(folder, cells, code), quiet=quiet):
        try:
            with interruptible():
                for _ in ended:
                    write_sweep(name, cells, folder)
        finally:
            write_sweep(name, cells, folder)
        if not quiet:
            click.echo(sweep_markdown(name, cells))
        _check_complete(folder, cells)
    return 0


def _check_complete(folder: Path, cells: Sequence["SweepCell"]) -> None:
    from picbench.errors import EngineError

    missed = [cell for cell in cells if cell.status != "complete"]
    if missed:
        states = ", ".join(sorted({cell.status for cell in missed}))
        raise EngineError(
            f"{len(missed)} of {len(cells)} cells are not complete ({states})",
            hint=f"see {folder / 'sweep.csv'}; the same command tries failed ones again, a partial "
            "or invalid one where its folder is gone",
        )
