"""`picbench warm`: chunks compiled into tiers ahead of requests."""

import sys
from pathlib import Path
from typing import Any

import click

from picbench.cli.guard import traced
from picbench.cli.options.shared_options import DEBUG, dtype_option


@click.command()
@click.option(
    "--chunks",
    required=True,
    metavar="FILE",
    help='Chunks, one a line: {"text": "..."} or {"tokens": [1, 2, ...]}, for context=document '
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
@dtype_option("Type of weights and KV, as for picbench run.")
@DEBUG
def warm(*, chunks: str, debug: bool, **flags: Any) -> int:
    """Compile chunks and store their KV in tiers.

    Engines that serve the same weights with the same tiers then load these chunks instead of
    compiling them. Exits with 4 if a chunk was not stored.
    """
    with traced(debug):
        from picbench.inputs.warm_tiers import read_chunks, warm_tiers

        return warm_tiers(read_chunks(Path(chunks)), sys.stdout, **flags)
