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
    DEVICE,
    DTYPE,
    FILE,
    OFFLINE,
    QUIET,
    complete_algorithms,
    complete_datasets,
    complete_models,
)
from picbench.engines.config import COMPILE_ORDERS, DEFAULT_TIERS, PRESSURE, SHARED_DECODE

if TYPE_CHECKING:
    from picbench.run.session import Services


@click.command(cls=GuardedCommand)
@click.option(
    "--algo",
    multiple=True,
    default=("full", "prefix", "mepic"),
    show_default="full,prefix,mepic",
    metavar="NAME[:OPTION=VALUE...][,NAME...]",
    help="Arms to compare, such as epic:k=16; repeat the flag or separate arms by commas.",
    shell_complete=complete_algorithms,
)
@click.option(
    "--arm",
    multiple=True,
    metavar="NAME=URL[,model=ID][,timeout=SECONDS][,simulated=yes]",
    help="An external OpenAI-compatible server as an arm beside those of --algo, such as "
    "theirs=http://host:8000/v1; repeat the flag for more. Its API key is read from "
    "OPENAI_API_KEY. Numbers of a simulated server are marked everywhere.",
)
@click.option(
    "--dataset",
    default="",
    metavar="NAME",
    help="See picbench list datasets.",
    shell_complete=complete_datasets,
)
@click.option(
    "--requests",
    metavar="FILE",
    help="Replay the requests that picbench traffic wrote, instead of a data set's rows.",
)
@click.option(
    "--data",
    default="bundled",
    show_default=True,
    metavar="bundled|DIR|FILE|hf:OWNER/NAME|hub",
    help="Rows: synthetic ones that picbench generates; a folder with NAME/*.jsonl (.json, "
    ".parquet, .arrow), or one file; a data set on the hub, "
    "hf:OWNER/NAME[@REVISION][:[CONFIG/]SPLIT]; or LongBench's at a pinned revision "
    "(hub:OWNER/NAME[@REVISION] for a copy of it).",
)
@click.option(
    "--columns",
    metavar="NAME|FIELD=COLUMN,...|FILE.yaml",
    show_default="LongBench's",
    help="Which columns of --data the fields of a row are in; see picbench list columns.",
)
@OFFLINE
@click.option(
    "--model",
    default="testbed",
    show_default=True,
    metavar="testbed|PATH|ID|shape:NAME",
    help="The model that comes with picbench, a folder, an id on the hub, or a shape with "
    "random weights.",
    shell_complete=complete_models,
)
@click.option("--limit", type=int, metavar="N", show_default="all rows", help="Rows to run.")
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="For the engine and the choice of rows; 0 takes rows in order.",
)
@click.option(
    "--concurrency",
    type=int,
    default=4,
    show_default=True,
    metavar="N",
    help="Requests in flight in an arm, each replaced as it ends.",
)
@click.option(
    "--rate",
    type=float,
    metavar="R",
    show_default="the request file's, or a closed loop",
    help="Open loop: R requests arrive per second on average, however long the queue is. "
    "--concurrency is then ignored, and the arms run one after another.",
)
@click.option(
    "--arrivals",
    type=click.Choice(["poisson", "uniform"]),
    default="poisson",
    show_default=True,
    help="Gaps between arrivals at --rate: random, or all the same.",
)
@click.option(
    "--max-running",
    type=int,
    default=64,
    show_default=True,
    metavar="N",
    help="Most requests that an engine computes at a time; others wait in its queue.",
)
@click.option(
    "--slo",
    metavar="ttft=MS[,tpot=MS][,e2e=MS]",
    help="Latency objectives: goodput counts the requests that meet all of them.",
)
@click.option(
    "--max-tokens",
    type=int,
    metavar="N",
    show_default="the data set's",
    help="Output tokens per request.",
)
@click.option(
    "--kv-blocks",
    type=int,
    metavar="N",
    show_default="what the workload needs, or fits the GPU",
    help="KV pool of each arm, in blocks of 16 tokens.",
)
@click.option(
    "--tiers",
    show_default=f"{DEFAULT_TIERS['cpu']} on a CPU, none on a GPU",
    metavar="KIND[:PLACE]:SIZE,...",
    help='Where chunk KV is stored below the pool, nearest first; see picbench list tiers. "": '
    "nowhere.",
)
@click.option(
    "--on-pressure",
    type=click.Choice(list(PRESSURE)),
    default="wait",
    show_default=True,
    help="What happens to a request that needs more KV blocks than are free or can be evicted.",
)
@click.option(
    "--compile-order",
    type=click.Choice(list(COMPILE_ORDERS)),
    default="head",
    show_default=True,
    help="When missing chunks are compiled: right before the first request that needs them, "
    "those of all waiting requests before any of these runs, or in order of arrival, interleaved "
    "with other requests (MiniPIC's ISPS).",
)
@DTYPE
@DEVICE
@click.option(
    "--tensor-parallel",
    type=int,
    default=1,
    show_default=True,
    metavar="N",
    help="GPUs of each engine; on CPU, processes that share the cores.",
)
@click.option(
    "--eager",
    is_flag=True,
    help="Neither compile the model nor capture CUDA graphs: engines start faster, run slower.",
)
@click.option(
    "--keys-without-rope",
    is_flag=True,
    help="Cache every key of a PIC engine without RoPE, as MEPIC and MiniPIC describe it. On CPU "
    "the keys of chunks are always cached this way.",
)
@click.option(
    "--shared-decode",
    type=click.Choice(list(SHARED_DECODE)),
    default="auto",
    show_default=True,
    help="On a GPU, whether decoding steps read a chunk once for all requests that see it: where "
    "that is expected to be faster (auto), or wherever two do (always, for checks).",
)
@click.option(
    "--context",
    type=int,
    metavar="N",
    show_default="the model's",
    help="Tokens of prompt and output; longer prompts lose their middle.",
)
@click.option(
    "--prompts",
    metavar="FILE",
    show_default="picbench's own prompts",
    help="Prompt templates in LongBench's JSON format.",
)
@click.option(
    "--chat",
    type=click.Choice(["auto", "on", "off"]),
    default="auto",
    show_default=True,
    help="The tokenizer's chat template around prompts; auto: if there is one, but not around "
    "few-shot prompts (samsum), as in LongBench.",
)
@click.option(
    "--scoring",
    type=click.Choice(["longbench", "cacheblend"]),
    default="longbench",
    show_default=True,
    help="LongBench's word F1 and Rouge-L, or CacheBlend's over token ids and stemmed words.",
)
@click.option(
    "--grid",
    metavar="MIN-MAX:LENGTHSxDEPTHS",
    show_default="1000-11000:20x10",
    help="Haystack tokens and needle depths, for needle over a folder of text files.",
)
@click.option(
    "--drop",
    type=click.Choice(["lead"]),
    show_default="nothing",
    help="Leave passages out of prompts: what precedes a passage that the answer needs in its "
    "document. Only KV that was compiled with context=document knows it then.",
)
@click.option(
    "--cache",
    type=click.Choice(["cold", "warm", "steady"]),
    show_default="empty at start, kept between requests",
    help="Declare the state of the arms' caches, and verify it from counters: dropped before each "
    "group of requests, filled with all chunks before the first one, or kept over 200 different "
    "prompts or more. A run that was in another state is invalid (exit 3).",
)
@click.option(
    "--repeats",
    type=int,
    default=1,
    show_default=True,
    metavar="N",
    help="Run all requests N times, each time from the same state of caches as the first time.",
)
@click.option(
    "--output",
    metavar="DIR",
    show_default="runs/<utc>-<dataset>-<model>-<fingerprint>",
    help="Run directory: new, empty, or of the same command, which then resumes it. By default an "
    "unfinished run of the same settings in runs/ is resumed.",
)
@click.option(
    "--same-engine",
    is_flag=True,
    help="Run full and prefix in the PIC engine too, instead of in stock vLLM.",
)
@click.option(
    "--on-bad-row",
    type=click.Choice(["stop", "skip"]),
    default="stop",
    show_default=True,
    help="What to do about a malformed row; skipped ones are counted.",
)
@click.option(
    "--self-check",
    is_flag=True,
    help="Before measuring, compare in each PIC engine ways to serve a prompt that must give the "
    "same answer; see picbench doctor.",
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


#: What settings are that were not given, if not none.


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
@click.option("--requests", type=int, metavar="N", show_default="100", help="Number of requests.")
@click.option("--seed", type=int, default=0, show_default=True, help="For everything drawn.")
@click.option(
    "--dataset",
    metavar="NAME",
    show_default="musique",
    help="Passages and questions of a data set, or synthetic: random tokens, for memory and time.",
)
@click.option(
    "--data",
    metavar="bundled|DIR|FILE|hf:OWNER/NAME",
    show_default="bundled",
    help="Rows of the data set.",
)
@click.option("--columns", metavar="NAME|FIELD=COLUMN,...", help="As in picbench run.")
@click.option(
    "--model",
    metavar="NAME",
    default="testbed",
    show_default=True,
    help="The model whose tokenizer makes the ids.",
)
@click.option(
    "--pool", type=int, metavar="N", show_default="64", help="Distinct chunks that requests share."
)
@click.option(
    "--join", type=int, metavar="N", show_default="1", help="Least number of passages in a chunk."
)
@click.option(
    "--chunk-tokens",
    type=int,
    metavar="N",
    show_default="0",
    help="Least number of tokens in a chunk.",
)
@click.option(
    "--passages", type=int, metavar="N", show_default="8", help="Passages of a generated context."
)
@click.option(
    "--questions",
    type=int,
    metavar="N",
    show_default="6",
    help="Questions about a generated context.",
)
@click.option(
    "--chunks",
    metavar="N|LOW-HIGH",
    help="Chunks of a request: those it asks about, and others. Without it, only the former.",
)
@click.option(
    "--zipf",
    type=float,
    metavar="A",
    show_default="0.0",
    help="Popularity of rank r is r^-A; 0: uniform.",
)
@click.option(
    "--cached",
    type=float,
    metavar="SHARE",
    help="EPIC's context-cache ratio: this share of chunk tokens is in the cache before the run, "
    "the rest belong to one request only.",
)
@click.option("--users", type=int, metavar="N", help="Users who each repeat one request.")
@click.option(
    "--rate", type=float, metavar="R", help="Arrivals per second; without it, a closed loop."
)
@click.option(
    "--arrivals",
    type=click.Choice(["poisson", "uniform"]),
    show_default="poisson",
    help="Gaps at --rate: random, or all the same.",
)
@click.option(
    "--max-tokens",
    type=int,
    metavar="N",
    show_default="the data set's",
    help="Output tokens per request.",
)
@click.option(
    "--trace",
    metavar="DIR",
    help="Replay real requests instead: the folder data of RAGPulse, with --requests, --speed, "
    "--longest, --max-tokens and --seed. Its passages and sessions are real, its text is random "
    "tokens.",
)
@click.option(
    "--speed",
    type=float,
    metavar="F",
    show_default="1.0",
    help="Replay the arrivals of a trace F times as fast.",
)
@click.option(
    "--longest",
    type=int,
    metavar="N",
    help="Leave out requests of a trace with more tokens of prompt and reply.",
)
def traffic(*, out: Path, preset: str | None, model: str, **flags: Any) -> int:
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
    written = TrafficWriter().write(out, config, models.resolve(model))
    for name, value in asdict(written.facts).items():
        shown = f"{value:,.4g}" if isinstance(value, float) else value
        click.echo(f"{name}: {'none' if value is None else shown}")
    if written.left_out:
        click.echo(f"left out, too long: {written.left_out}")
    click.echo(str(out))
    return 0
