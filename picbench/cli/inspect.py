"""Commands that tell without a run: doctor, explain, list, selftest, profile."""

import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from shutil import get_terminal_size
from textwrap import wrap
from typing import TYPE_CHECKING, Any, TypeVar

import click

from picbench.cli.guard import GuardedCommand, with_flags
from picbench.cli.options import AS_JSON, DEVICE, DTYPE, FILE, options_of, style_of

if TYPE_CHECKING:
    from picbench.run.session import Services
    from picbench.workloads.traffic.trace import Encode

FAILED = 3

#: Seconds between two lines of progress.
_EVERY = 2.0

T = TypeVar("T")


@click.command(cls=GuardedCommand)
@click.option(
    "--model",
    metavar="testbed|smollm2|PATH|ID|shape:NAME",
    show_default="no self-check",
    help="Check the answers of engines with this model; under a minute for small models.",
)
@DEVICE
@DTYPE
@AS_JSON
@click.pass_context
def doctor(context: click.Context, /, *, as_json: bool, **given: Any) -> int:
    """Say what is installed, whether it fits together, and what works on this machine.

    With --model, stock vLLM and picbench serve the same prompts one after the other, and the
    log-probabilities of their answers are compared: full recompute, chunks whose tokens are all
    linked, and a chunk in place of a prefix must give the same. Errors show best in float32. The
    last line is the verdict; exits with 3 if it is not ok.
    """
    from picbench.experiments.controls import diagnose
    from picbench.run.session import Services

    services: Services = context.obj or Services()
    found = diagnose(**given, launch=services.launch)
    text = json.dumps(found.document(), indent=1) if as_json else found.text()
    click.echo(with_flags(text, context))
    return 0 if found.ok else FAILED


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
    from picbench.figures import plan as explanation
    from picbench.tables.table import PipedConsole

    found = parse(algorithm)
    picture = explanation.example_picture(found, chunks, tokens)
    if output is not None:
        explanation.draw_plan(picture, found.spec, output)
    console = PipedConsole(file=sys.stdout, highlight=False, markup=False, soft_wrap=True)
    for part in explanation.explain(found, picture):
        console.print(part)
    if output is not None:
        click.echo(f"\n{output}")
    return 0


@click.group(name="list")
def listing() -> None:
    """List algorithms, datasets, columns, models, tiers or traffic with their options."""


@listing.command()
def algorithms() -> None:
    """Algorithms and their options, for --algo."""
    from picbench.engines import algorithms as known

    _print([("algorithm", "what it does, and below it its options"), *known.describe()])


@listing.command()
def datasets() -> None:
    """Data sets, for --dataset."""
    from picbench.workloads import datasets as known

    _print(known.describe().items())


@listing.command()
def columns() -> None:
    """Fields of rows and mappings by name, for --columns."""
    from picbench.workloads.sources import columns as known

    _print(known.FIELDS.items())
    click.echo("Mappings by name:")
    _print(known.NAMED.items())


@listing.command()
def models() -> None:
    """Built-in models, for --model, and architectures: which were checked, which are refused."""
    from picbench.workloads import models as known
    from picbench.workloads.models import architectures

    _print(known.describe().items())
    click.echo("Architectures, checked against the oracle with tiny models of random weights:")
    _print(architectures.rows())
    click.echo("Of vLLM's recipes for text models such that were checked, by what attention is:")
    _print(architectures.coverage())


@listing.command()
def tiers() -> None:
    """Kinds of storage below the KV pool, for --tiers."""
    from picbench.engines.chunk_cache.tiers.notation import describe_tiers

    _print(describe_tiers())


@listing.command()
def traffic() -> None:
    """Papers' workloads, for picbench traffic --preset."""
    from picbench.papers.settings import presets

    for_each = ((name, values.items()) for name, values in presets().items())
    _print((name, ", ".join(f"{key}={value}" for key, value in found)) for name, found in for_each)


def _print(rows: Iterable[tuple[str, ...]]) -> None:
    entries = list(rows)
    names = max((len(entry[0]) for entry in entries), default=0)
    width = min(100, get_terminal_size((100, 24)).columns) - names - 2
    for name, *texts in entries:
        lines = [line for text in texts for line in wrap(text, max(width, 30))]
        for place, line in enumerate(lines or [""]):
            click.echo(f"{'' if place else name:<{names}}  {line}".rstrip())


@click.command(cls=GuardedCommand)
@options_of(
    "picbench.settings:RunConfig",
    only=("dataset", "data", "model", "limit", "dtype", "device", "output"),
    dataset={"default": "musique", "show_default": True},
    limit={"default": 40, "show_default": True, "type": click.IntRange(2)},
    output={"show_default": False, "help": "Run directory; new or empty."},
)
@AS_JSON
@click.pass_obj
def selftest(services: "Services | None", /, *, as_json: bool, **flags: Any) -> int:
    """Run negative controls: comparisons whose outcome is known.

    Full recompute must not differ from itself, reuse without recomputation must lose score, and
    chunks with the KV of other chunks must lose nearly all of it. Prints what was expected and
    found; exits with 3 if a control failed, because then no other number here means anything.
    """
    from dataclasses import asdict

    from picbench.experiments.controls import prepare_controls, run_controls
    from picbench.run.schedule import Progress
    from picbench.run.session import Services
    from picbench.settings import parse_config

    services = services or Services()
    # Requests alone in their round: what one round has in common is not in the way.
    config = parse_config({**flags, "algo": ("full",), "concurrency": 1})
    job = prepare_controls(config, services)
    path, controls = run_controls(job, services, Progress(job.requests, sys.stderr))
    passed = all(control.passed for control in controls)
    if as_json:
        found = [asdict(control) for control in controls]
        click.echo(json.dumps({"passed": passed, "run": str(path), "controls": found}))
        return 0 if passed else FAILED
    for control in controls:
        verdict = "ok" if control.passed else "FAILED"
        click.echo(f"{verdict:6}  {control.name}: {control.found} ({control.expected})")
    click.echo(path)
    return 0 if passed else FAILED


@click.command(cls=GuardedCommand)
@click.argument("file", metavar="FILE", type=click.Path(), required=False)
@options_of(
    "picbench.settings:ProfileConfig",
    calibration={"type": click.Path(exists=True, dir_okay=False)},
)
@style_of("text", "json", "markdown", help="Output format.")
def profile(
    *,
    file: str | None,
    requests: str | None,
    algo: str,
    model: str,
    figure: Path | None,
    style: str,
    **given: Any,
) -> int:
    """Say whether position-independent caching is worth it for the requests in FILE.

    FILE is a log of OpenAI or Anthropic requests, a session of Claude Code or Codex, an export of
    LangSmith or OTEL, a published trace, or a folder of these; see docs/traffic.md. Simulates
    prefix caching, reordering and PIC, block by block; no model, GPU or engine is needed. Times and
    memory are interpolated between measured cells. What arms keep of answers was measured on other
    texts, with the models that are named.
    """
    from functools import partial

    from picbench.engines.algorithms import Registry
    from picbench.profile.predictor import choose_predictor
    from picbench.profile.profile import profile_trace
    from picbench.profile.profile_report import ProfileReport
    from picbench.run.arm import parse_arms
    from picbench.workloads.traffic.trace_file import read_trace_file

    trace = file or requests
    if trace is None or (file and requests):
        raise click.UsageError("name one file of requests: picbench profile FILE")
    registry = Registry()
    named = parse_arms([algo], same_engine=False)
    arms = [registry.parse(arm.name if arm.bare else arm.algorithm) for arm in named]
    predictor = choose_predictor(given.pop("grid"), given.pop("calibration"))
    opened = read_trace_file(Path(trace), partial(_encoder, model), partial(_told, "read"))
    opened = replace(opened, requests=_told("counted", opened.requests))
    found = profile_trace(trace, opened, arms, predictor, **given)
    report = ProfileReport(found, predictor)
    click.echo({"text": report.text, "json": report.json, "markdown": report.markdown}[style]())
    if figure:
        from picbench.figures.frontier import draw_profile

        saved = {arm.spec: arm.counted.saved for arm in found.arms}
        base = figure.with_suffix("") if figure.suffix in (".png", ".svg") else figure
        draw_profile(saved, f"{found.name}: a simulation, {report.advice.line}", base)
    return 0


def _told(what: str, items: Iterator[T]) -> Iterator[T]:
    """Items, of which stderr is told every few seconds how many there were."""
    printed = time.monotonic()
    for number, item in enumerate(items, 1):
        yield item
        if time.monotonic() - printed > _EVERY:
            printed = time.monotonic()
            click.echo(f"picbench: {number:,} requests {what}", err=True)


def _encoder(model: str) -> "Encode":
    from picbench.workloads import models
    from picbench.workloads.prompts.tokens import prompt_encoder

    return prompt_encoder(models.plain_tokenizer(models.resolve(model, weights=False)))
