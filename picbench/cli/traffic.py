"""`picbench traffic`: requests to replay."""

from pathlib import Path
from typing import Any

import click

from picbench.cli.guard import GuardedCommand
from picbench.cli.options import FILE


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

    from picbench.inputs.traffic_file import TrafficWriter, parse_traffic
    from picbench.papers.paper_settings import find_preset
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
