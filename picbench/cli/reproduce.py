"""`picbench reproduce` and `picbench figures`: a paper's figures, measured and redrawn."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from picbench.cli.guard import GuardedCommand
from picbench.cli.options import FILE, FOLDER, RangeOfNumbers, options_of

if TYPE_CHECKING:
    from picbench.papers.reproduce import Estimate, Reproduction
    from picbench.run.session import Services

_PAPERS = ("mepic", "epic", "cacheblend", "minipic")

_ACCURACY = "accuracy"

_ALL = (*_PAPERS, _ACCURACY)

_DRY = "dry run: no engine was started, nothing was written"

#: Where scores row by row lie in a checkout.
_SCORES = click.option(
    "--scores",
    type=FOLDER,
    metavar="DIR",
    help="Scores of picbench measure algorithms serve, instead of measuring them.",
)


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
@click.option(
    "--models",
    metavar="ID,ID",
    show_default="EPIC's three models",
    help="accuracy: names on the hub, or folders.",
)
@click.option(
    "--rows",
    type=click.IntRange(2),
    metavar="N",
    show_default="the settings'",
    help="accuracy: of each set.",
)
@click.option(
    "--data",
    metavar="WHERE",
    show_default="hub",
    help="accuracy: hub, bundled, DIR; see picbench run.",
)
@click.option("--texts", metavar="DIR", help="accuracy: texts to hide needles in.")
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
def reproduce(services: "Services | None", /, *, paper: str, dry_run: bool, **given: Any) -> int:
    """Measure what a paper's figures show, compare it with the paper, and judge its claims.

    Every point is a run directory, so the same command continues where it was stopped. Prints
    DIR/README.md, which has verdicts, tables and figures.

    accuracy is not a paper: it scores trained models of which you have the weights, under the
    papers' arms on six data sets.
    """
    given["output"] = given["output"] or Path("runs") / paper
    if paper == _ACCURACY:
        return _accuracy(dry_run, given)
    _refuse(given, ("models", "rows", "data", "texts"), f"`PAPER` {paper} has none; accuracy does")
    plan = _plan(paper, given)
    if dry_run:
        from picbench.papers.reproduce import estimate

        return _print_estimates("experiment", estimate(plan), _DRY)
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


def _plan(paper: str, given: Mapping[str, Any]) -> "Reproduction":
    from picbench.errors import ConfigError, closest
    from picbench.papers.reproduce import Reproduction
    from picbench.papers.settings import changed, read_settings

    found = read_settings(paper, Path(given["settings"]) if given["settings"] else None)
    for figure in given["figures"]:
        if figure != "all" and figure not in found.figures:
            raise ConfigError(
                f"`figure` {figure}: {paper} has none of that name",
                hint=closest(figure, ("all", *found.figures)),
            )
    return Reproduction(
        paper,
        changed(found, **{name: given[name] for name in ("model", "requests", "seeds")}),
        given["figures"],
        given["device"],
        given["output"],
        given["scores"],
        given["commit"],
        given["seconds"] or 0.0,
        given["part"],
    )


def _refuse(given: Mapping[str, Any], names: Sequence[str], hint: str) -> None:
    from picbench.errors import ConfigError

    for name in names:
        if given[name] is not None:
            raise ConfigError(f"`{name}` {given[name]}: not an option here", hint=hint)


def _accuracy(dry_run: bool, given: Mapping[str, Any]) -> int:
    from picbench.papers.accuracy import AccuracyRun, read_accuracy, write_accuracy

    unset = {
        "figure": None if given["figures"] == ("all",) else given["figures"][0],
        "part": None if given["part"] == (1, 1) else "K/N",
    }
    others = ("figure", "model", "requests", "seeds", "seconds", "part")
    _refuse({**given, **unset}, others, "accuracy has `models`, `rows` and `data`")
    found = read_accuracy(Path(given["settings"]) if given["settings"] else None)
    found = found.model_copy(update={"rows": given["rows"]} if given["rows"] else {})
    names = given["models"]
    models = [name.strip() for name in names.split(",")] if names else found.models
    folder = given["output"]
    plan = AccuracyRun(
        found, models, given["device"], folder, given["data"], given["texts"], given["commit"]
    )
    if dry_run:
        return _print_estimates("model", plan.estimates(), _DRY)
    plan.run()
    write_accuracy(found, folder, given["scores"])
    click.echo((folder / "README.md").read_text(encoding="utf-8"), file=sys.stdout)
    click.echo(folder / "README.md")
    return 0


def _print_estimates(first: str, estimates: Iterable["Estimate"], heading: str) -> int:
    """Print what is left of experiments, or of models, as `first` says."""
    from picbench.run.progress import minutes
    from picbench.run.result import print_all
    from picbench.tables.table import Column, Shown, Table

    found = list(estimates)
    columns = [Column(name) for name in (first, "left", "prompt tokens", "time left\nmin:s")]
    rows = [
        [one.name, f"{one.left} of {one.total} {one.what}", one.tokens, Shown(minutes(one.seconds))]
        for one in found
    ]
    print_all(
        sys.stdout,
        heading,
        Table("", columns, rows),
        f"in all about {minutes(sum(one.seconds for one in found))}, on two idle cores of an AMD "
        "EPYC or an H200; starts of engines included",
    )
    return 0


def _reproduce(services: "Services | None", plan: "Reproduction") -> int:
    from picbench.files import locked
    from picbench.papers.page import write_page
    from picbench.papers.reproduce import estimate
    from picbench.run.progress import open_progress
    from picbench.run.session import Services

    whole = plan.run(services or Services(), open_progress)
    with locked(plan.output / "README.md"):
        write_page(plan.name, plan.settings, plan.output, plan.scores)
    page = plan.output / "README.md"
    click.echo(page.read_text(encoding="utf-8"), file=sys.stdout)
    if not whole:
        heading = "time is over; the same command continues with what is left here"
        _print_estimates("experiment", estimate(plan), heading)
    click.echo(page)
    return 0
