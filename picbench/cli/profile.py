"""`picbench profile`: is PIC worth it for these requests?"""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from picbench.cli.guard import GuardedCommand
from picbench.cli.options import FILE

if TYPE_CHECKING:
    from picbench.profile.advice import ProfileReport
    from picbench.profile.grid import MeasuredGrid
    from picbench.profile.profile import TraceProfile
    from picbench.profile.traces import Encode


@click.command(cls=GuardedCommand)
@click.argument("trace", metavar="TRACE")
@click.option(
    "--algo",
    default="full,prefix,reorder,epic:k=16,epic:k=16:copy=shared,mepic,naive",
    show_default=True,
    metavar="SPEC,...",
    help="Arms to count.",
)
@click.option(
    "--pool",
    type=click.IntRange(1),
    metavar="BLOCKS",
    show_default="nothing is evicted",
    help="Count with a KV pool of this many blocks of 16 tokens, too.",
)
@click.option(
    "--running",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    metavar="N",
    help="Requests at a time, for throughput and memory.",
)
@click.option(
    "--requests",
    type=click.IntRange(1),
    metavar="N",
    show_default="all",
    help="Only the first N.",
)
@click.option(
    "--model",
    default="testbed",
    show_default=True,
    metavar="NAME",
    help="The model whose tokenizer encodes texts.",
)
@click.option(
    "--grid",
    metavar="NAME|FILE",
    show_default="h200-llama-3.1-8b",
    help="Predict from this measured grid: one of the package's, or a grid.json; none: only count.",
)
@click.option(
    "--calibration",
    metavar="FILE",
    help="Predict times of another machine, on which some cells of the grid were measured again: a "
    "grid.json of picbench measure break-even --seconds 300.",
)
@click.option(
    "--figure",
    type=FILE,
    metavar="FILE",
    help="Draw the computed tokens, as FILE.png and FILE.svg.",
)
@click.option(
    "--format",
    "style",
    type=click.Choice(["text", "json", "markdown"]),
    default="text",
    show_default=True,
    help="Output format.",
)
def profile(
    *,
    trace: str,
    algo: str,
    pool: int | None,
    running: int,
    requests: int | None,
    model: str,
    grid: str | None,
    calibration: str | None,
    figure: Path | None,
    style: str,
) -> int:
    """Count what caches could reuse of a trace, and predict times and memory.

    TRACE is a file of JSON Lines (see docs/profile.md), a request file of picbench traffic, or
    RAGPulse's folder. Simulates prefix caching, reordering and PIC, block by block; no model, GPU
    or engine is needed. Times and memory are interpolated between measured cells.
    """
    from functools import partial

    from picbench.engines.algorithms import Registry
    from picbench.profile.advice import FORMATS
    from picbench.profile.grid import choose_calibration, choose_grid
    from picbench.profile.profile import profile_trace
    from picbench.profile.traces import read_trace_file
    from picbench.run.arm import parse_arms

    registry = Registry()
    arms = [registry.parse(arm.algorithm) for arm in parse_arms([algo], same_engine=False)]
    measured = choose_grid(grid)
    found = profile_trace(
        trace,
        read_trace_file(Path(trace), partial(_encoder, model)),
        arms,
        pool=pool,
        running=running,
        facts=measured.facts if measured else None,
        requests=requests,
    )
    report = _report(found, measured, choose_calibration(calibration, measured))
    click.echo(FORMATS[style](report).rstrip("\n"))
    if figure:
        from picbench.figures.frontier import draw_profile

        saved = {arm.algorithm.spec: arm.counted.saved for arm in found.arms}
        base = figure.with_suffix("") if figure.suffix in (".png", ".svg") else figure
        draw_profile(saved, f"{found.name}: a simulation, {report.advice.line}", base)
    return 0


def _report(
    found: "TraceProfile", measured: "MeasuredGrid | None", calibration: "MeasuredGrid | None"
) -> "ProfileReport":
    from picbench.profile.advice import ProfileReport, advise
    from picbench.profile.predictor import GridPredictor

    predictor = GridPredictor(measured, calibration=calibration) if measured else None
    predicted = (
        {arm.algorithm.spec: predictor.predict(found, arm) for arm in found.arms}
        if predictor
        else {}
    )
    errors = predictor.errors() if predictor else None
    return ProfileReport(found, predictor, predicted, errors, advise(found, predicted))


def _encoder(model: str) -> "Encode":
    from picbench.workloads import models
    from picbench.workloads.prompts.tokens import encode, start_tokens

    tokenizer = models.load_tokenizer(models.resolve(model))
    start = start_tokens(tokenizer)

    def ids(text: str) -> tuple[int, ...]:
        return (*start, *(encode(tokenizer, [text])[0] if text else ()))

    return ids
