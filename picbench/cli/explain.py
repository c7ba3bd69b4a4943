"""`picbench explain`: what an algorithm makes of a prompt."""

import sys
from pathlib import Path

import click

from picbench.cli.guard import GuardedCommand
from picbench.cli.options import FILE


@click.command(cls=GuardedCommand)
@click.argument("algorithm")
@click.option(
    "--chunks", type=int, default=4, show_default=True, metavar="N", help="Chunks of the prompt."
)
@click.option(
    "--tokens", type=int, default=40, show_default=True, metavar="N", help="Tokens of each chunk."
)
@click.option("--output", type=FILE, metavar="FILE.png", help="Draw the picture there, too.")
def explain(algorithm: str, chunks: int, tokens: int, output: Path | None) -> int:
    """Show an algorithm's plan of a small prompt: its blocks, and which token sees which.

    ALGORITHM is what --algo takes, with its options: epic:k=8. The prompt is a text, chunks and a
    question; the plan is the one that the engine would carry out. No engine is started.
    """
    from picbench.engines.algorithms import parse
    from picbench.output import explanation
    from picbench.output.tables.printing import PipedConsole

    found = parse(algorithm)
    picture = explanation.example_picture(found, chunks, tokens)
    if output is not None:
        from picbench.output.figures.plan_figure import draw_plan

        draw_plan(picture, found.spec, output)
    console = PipedConsole(file=sys.stdout, highlight=False, markup=False, soft_wrap=True)
    for part in explanation.explain(found, picture):
        console.print(part)
    if output is not None:
        click.echo(f"\n{output}")
    return 0
