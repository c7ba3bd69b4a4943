"""`picbench reproduce` and `picbench figures`: a paper's figures, measured and redrawn."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from picbench.cli.guard import GuardedCommand
from picbench.cli.options import FILE, FOLDER, RangeOfNumbers, options_of

if TYPE_CHECKING:
    from picbench.papers.accuracy import AccuracyRun
    from picbench.papers.reproduce import Reproduction
    from picbench.papers.settings import Device
    from picbench.run.session import Services

_PAPERS = ("mepic", "epic", "cacheblend", "minipic")

_ACCURACY = "accuracy"

_ALL = (*_PAPERS, _ACCURACY)

#: One part of one: everything.
_WHOLE = (1, 1)

_DRY = "dry run: no engine was started, nothing was written"

#: Where scores row by row lie in a checkout.
_SCORES = click.option(
    "--scores",
    type=FOLDER,
    metavar="DIR",
    help="Scores of picbench measure algorithms serve, instead of measuring them.",
)


def _of_accuracy(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of ``accuracy``, which is about models and not about a paper."""
    options = (
        click.option(
            "--models",
            metavar="ID,ID",
            show_default="EPIC's three models",
            help="accuracy: names on the hub, or folders.",
        ),
        click.option(
            "--rows",
            type=click.IntRange(2),
            metavar="N",
            show_default="the settings'",
            help="accuracy: of each set.",
        ),
        click.option(
            "--data",
            metavar="WHERE",
            show_default="hub",
            help="accuracy: hub, bundled, DIR; see picbench run.",
        ),
        click.option("--texts", metavar="DIR", help="accuracy: texts to hide needles in."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command(cls=GuardedCommand)
@click.argument("paper", metavar="PAPER", type=click.Choice(_ALL))
@click.option(
    "--figure",
    "figures",
    multiple=True,
    metavar="NAME",
    default=("all",),
    show_default=True,
    help="What to make, such as table2 or fig8; repeat the flag for more.",
)
@click.option(
    "--output",
    metavar="DIR",
    type=FOLDER,
    show_default="runs/PAPER",
    help="Where runs, data, tables and figures go; what is complete in it is not run again.",
)
@click.option(
    "--device",
    type=click.Choice(("cpu", "cuda")),
    default="cpu",
    show_default=True,
    help="What engines run on; also decides sizes: the testbed's on a CPU, the paper's on a GPU.",
)
@click.option("--model", metavar="NAME", show_default="the paper's file", help="See picbench run.")
@click.option(
    "--requests",
    type=click.IntRange(1),
    metavar="N",
    help="Requests of every point; fewer is faster.",
)
@click.option(
    "--seeds",
    type=click.IntRange(1),
    metavar="N",
    help="Take only the first N seeds of the settings.",
)
@click.option("--settings", metavar="FILE", help="Other loads, arms and claims, in YAML.")
@_of_accuracy
@_SCORES
@click.option(
    "--seconds",
    type=RangeOfNumbers(0),
    metavar="S",
    help="Start nothing that would end later; the same command continues.",
)
@click.option(
    "--commit", metavar="NAME", help="Name of the measured code, if this is not a checkout."
)
@options_of("picbench.experiments.measurements:BreakEven", only=("part",))
@click.option("--dry-run", is_flag=True, help="Say what is left to do and how long it may take.")
@click.pass_obj
def reproduce(
    services: "Services | None",
    /,
    *,
    paper: str,
    dry_run: bool,
    **options: Any,
) -> int:
    """Measure what a paper's figures show, compare it with the paper, and judge its claims.

    Every point is a run directory, so the same command continues where it was stopped. Prints
    DIR/README.md, which has verdicts, tables and figures.

    accuracy is not a paper: it scores trained models of which you have the weights, under the
    papers' arms on six data sets.
    """
    of_accuracy = {name: options.pop(name) for name in ("models", "rows", "data", "texts")}
    if paper == _ACCURACY:
        options["part"] = None if options["part"] == _WHOLE else "K/N"
        return _accuracy(dry_run, **of_accuracy, **options)
    _refuse(of_accuracy, f"`PAPER` {paper} has none; accuracy does")
    plan = _plan(paper, **options)
    if dry_run:
        return _print_estimates(plan, _DRY)
    return _reproduce(services, plan)


@click.command(cls=GuardedCommand)
@click.argument("papers", metavar="PAPER...", nargs=-1, type=click.Choice((*_ALL, "all")))
@click.option(
    "--data",
    type=FOLDER,
    metavar="DIR",
    default=Path("results/papers"),
    show_default=True,
    help="Folder with one folder per paper, as picbench reproduce wrote it.",
)
@_SCORES
@click.option(
    "--claims",
    type=FILE,
    metavar="FILE",
    help="Document whose table of claims is rewritten, from the verdicts of all papers.",
)
def figures(papers: Sequence[str], data: Path, scores: Path | None, claims: Path | None) -> int:
    """Redraw and judge papers from compact data, without running anything."""
    from picbench.papers.accuracy import read_accuracy, write_accuracy
    from picbench.papers.judge import write_claims
    from picbench.papers.page import counts_of, write_page
    from picbench.papers.settings import read_settings

    for name in _wanted(papers, data):
        if name == _ACCURACY:
            verdicts = write_accuracy(read_accuracy(), data / name, scores)
        else:
            verdicts = write_page(name, read_settings(name), data / name, scores)
        click.echo(f"{data / name / 'README.md'}: {counts_of(verdicts)}")
    if claims is not None:
        titles = [(read_settings(name).paper, data / name) for name in _PAPERS]
        write_claims(claims, [(title.partition(",")[0], folder) for title, folder in titles])
    return 0


def _wanted(papers: Sequence[str], data: Path) -> Sequence[str]:
    """The papers that are named, or all that `data` has; ConfigError where one is not there."""
    from picbench.errors import ConfigError

    named = _ALL if not papers or "all" in papers else tuple(dict.fromkeys(papers))
    found = [name for name in named if (data / name).is_dir()]
    if found and named == _ALL:
        return found
    for name in named:
        if name not in found:
            raise ConfigError(
                f"`data` {data}: no folder {name} in it",
                hint=f"picbench reproduce {name} makes one; `data` is what is above it",
            )
    return found


def _plan(
    paper: str,
    *,
    figures: Sequence[str],
    output: Path | None,
    device: "Device",
    model: str | None,
    requests: int | None,
    seeds: int | None,
    settings: str | None,
    scores: Path | None,
    seconds: float | None,
    commit: str | None,
    part: tuple[int, int],
) -> "Reproduction":
    from picbench.errors import ConfigError, closest
    from picbench.papers.reproduce import Reproduction
    from picbench.papers.settings import changed, read_settings

    found = read_settings(paper, Path(settings) if settings else None)
    for figure in figures:
        if figure != "all" and figure not in found.figures:
            raise ConfigError(
                f"`figure` {figure}: {paper} has none of that name",
                hint=closest(figure, ("all", *found.figures)),
            )
    found = changed(found, model=model, requests=requests, seeds=seeds)
    folder = output or Path("runs") / paper
    spent = seconds or 0.0
    return Reproduction(paper, found, figures, device, folder, scores, commit, spent, part)


def _refuse(options: Mapping[str, Any], hint: str) -> None:
    from picbench.errors import ConfigError

    for name, value in options.items():
        if value is not None:
            raise ConfigError(f"`{name}` {value}: not an option here", hint=hint)


def _accuracy(
    dry_run: bool,
    *,
    models: str | None,
    rows: int | None,
    data: str | None,
    texts: str | None,
    output: Path | None,
    device: "Device",
    settings: str | None,
    scores: Path | None,
    commit: str | None,
    figures: Sequence[str],
    **others: Any,
) -> int:
    from picbench.papers.accuracy import AccuracyRun, read_accuracy, write_accuracy

    chosen = None if tuple(figures) == ("all",) else figures[0]
    _refuse({"figure": chosen, **others}, "accuracy has `models`, `rows` and `data`")
    found = read_accuracy(Path(settings) if settings else None)
    found = found.model_copy(update={"rows": rows} if rows else {})
    names = [name.strip() for name in models.split(",")] if models else found.models
    folder = output or Path("runs") / _ACCURACY
    plan = AccuracyRun(found, names, device, folder, data, texts, commit)
    if dry_run:
        return _print_accuracy(plan)
    plan.run()
    write_accuracy(found, folder, scores)
    click.echo((folder / "README.md").read_text(encoding="utf-8"), file=sys.stdout)
    click.echo(folder / "README.md")
    return 0


def _print_accuracy(plan: "AccuracyRun") -> int:
    from picbench.papers.data import START

    rows = [
        (one.model, f"{one.left} of {one.total} rows", one.tokens, one.seconds)
        for one in plan.estimates(START[plan.device])
    ]
    _print_table("model", rows, _DRY)
    return 0


def _print_estimates(plan: "Reproduction", heading: str) -> int:
    from picbench.papers.reproduce import estimate

    rows = [
        (one.experiment, f"{one.left} of {one.total} {one.what}", one.tokens, one.seconds)
        for one in estimate(plan)
    ]
    _print_table("experiment", rows, heading)
    return 0


def _print_table(first: str, rows: Sequence[tuple[str, str, int, float]], heading: str) -> None:
    """What is left: name, units, prompt tokens, seconds."""
    from rich.table import Table

    from picbench.run.progress import minutes
    from picbench.run.result import print_all

    table = Table()
    table.add_column(first)
    for column in ("left", "prompt tokens", "time left\nmin:s"):
        table.add_column(column, justify="right")
    for name, left, tokens, seconds in rows:
        table.add_row(name, left, f"{tokens:,}", minutes(seconds))
    print_all(
        sys.stdout,
        heading,
        table,
        f"in all about {minutes(sum(row[3] for row in rows))}, on two idle cores of an AMD "
        "EPYC or an H200; starts of engines included",
    )


def _reproduce(services: "Services | None", plan: "Reproduction") -> int:
    from picbench.files import locked
    from picbench.papers.page import write_page
    from picbench.run.progress import open_progress
    from picbench.run.session import Services

    whole = plan.run(services or Services(), open_progress)
    with locked(plan.output / "README.md"):
        write_page(plan.name, plan.settings, plan.output, plan.scores)
    page = plan.output / "README.md"
    click.echo(page.read_text(encoding="utf-8"), file=sys.stdout)
    if not whole:
        _print_estimates(plan, "time is over; the same command continues with what is left here")
    click.echo(page)
    return 0
