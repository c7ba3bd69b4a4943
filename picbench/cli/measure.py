"""Commands of experiments: measure, a command for each measurement; reproduce and figures."""

import os
import sys
from collections.abc import Iterable, MutableMapping, Sequence
from functools import partial
from inspect import cleandoc
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import click

from picbench.cli.guard import CommandGroup, GuardedCommand
from picbench.cli.options import FILE, FOLDER, make_option, options_of

if TYPE_CHECKING:
    from picbench.papers.data import Estimate
    from picbench.papers.reproduce import Reproduction
    from picbench.papers.settings import ReproduceConfig
    from picbench.run.measurements import Measurement
    from picbench.run.session import Services


class MeasureGroup(CommandGroup):
    """A group whose commands are made when they are needed: one for each measurement of a name.

    The command of ``algorithms serve`` is `serve` in the group `algorithms`.
    """

    _commands: MutableMapping[str, click.Command]
    _added: bool

    @property
    def commands(self) -> MutableMapping[str, click.Command]:
        """See `click.Group`."""
        from picbench.run.measurements import GROUPS, MEASUREMENTS

        if not self._added:
            self._added = True
            groups = {name: CommandGroup(name, help=text) for name, text in GROUPS.items()}
            self._commands.update(groups)
            for found in MEASUREMENTS:
                *above, name = found.name.split()
                group: click.Group = self
                if above:
                    group = groups[above[0]]
                group.add_command(_command(name, found))
        return self._commands

    @commands.setter
    def commands(self, commands: MutableMapping[str, click.Command]) -> None:
        self._commands, self._added = commands, False


def _command(name: str, found: "Measurement") -> click.Command:
    options = [make_option(*field) for field in found.settings.model_fields.items()]
    text = cleandoc(found.settings.__doc__ or "")
    return GuardedCommand(name, params=options, callback=partial(_measure, found), help=text)


def _measure(found: "Measurement", **flags: Any) -> int:
    from picbench.settings import parse_settings
    from picbench.workloads.models import engine_packages

    # Triton reads both when it is imported. It multiplies float32 in TensorFloat-32 if not told.
    if found.exact:
        os.environ["TRITON_F32_DEFAULT"] = "ieee"
    if found.interpreted and flags["device"] == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    settings = parse_settings(found.settings, flags, f"picbench measure {found.name}")
    with engine_packages():
        outcome = resolve_name(f"picbench.{found.function}")(settings)
    if outcome.page:
        click.echo(outcome.page)
    return int(outcome.code)


@click.group(cls=MeasureGroup)
def measure() -> None:
    """Measure and check parts of picbench by themselves."""


_PAPERS = ("mepic", "epic", "cacheblend", "minipic")

_OF_MODELS = ("accuracy", "likelihood")

_ALL = (*_PAPERS, *_OF_MODELS)

_DRY = "dry run: no engine was started, nothing was written"

_CONFIG = "picbench.papers.settings:ReproduceConfig"


@click.command(cls=GuardedCommand)
@click.argument("paper", metavar="PAPER", type=click.Choice(_ALL))
@options_of(_CONFIG)
@click.pass_obj
def reproduce(services: "Services | None", /, *, paper: str, **given: Any) -> int:
    """Measure what a paper's figures show, compare it with the paper, and judge its claims.

    Every point is a run directory, so the same command continues where it was stopped. Prints
    DIR/README.md, which has verdicts, tables and figures.

    accuracy and likelihood are not papers. The first scores trained models of which you have the
    weights, under the papers' arms on six data sets; the other asks how likely they find right
    answers, which tells arms apart with fewer rows and smaller models.
    """
    from picbench.papers.settings import ReproduceConfig
    from picbench.settings import parse_settings

    config = parse_settings(ReproduceConfig, given, "picbench reproduce")
    output = config.output or Path("runs") / paper
    if paper in _OF_MODELS:
        return _of_models(paper, config, output)
    hint = f"`PAPER` {paper} has none; accuracy does"
    _refuse(config, ("models", "rows", "data", "texts"), hint)
    plan = _plan(paper, config, output)
    if config.dry_run:
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
@options_of(_CONFIG, only=("scores",))
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
        if name in _OF_MODELS:
            verdicts = write_accuracy(read_accuracy(name=name), data / name, scores)
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


def _plan(paper: str, config: "ReproduceConfig", output: Path) -> "Reproduction":
    from picbench.errors import ConfigError, closest
    from picbench.papers.reproduce import Reproduction
    from picbench.papers.settings import changed, read_settings

    found = read_settings(paper, Path(config.settings) if config.settings else None)
    for figure in config.figures:
        if figure != "all" and figure not in found.figures:
            raise ConfigError(
                f"`figure` {figure}: {paper} has none of that name",
                hint=closest(figure, ("all", *found.figures)),
            )
    return Reproduction(paper, changed(found, config), config, output)


def _refuse(config: "ReproduceConfig", names: Sequence[str], hint: str) -> None:
    """Raise ConfigError for settings that are not for what is reproduced."""
    from picbench.errors import ConfigError

    for name in names:
        value = getattr(config, name)
        if value != type(config).model_fields[name].default:
            flag, shown = {"figures": ("figure", config.figures[0]), "part": ("part", "K/N")}.get(
                name, (name, value)
            )
            raise ConfigError(f"`{flag}` {shown}: not an option here", hint=hint)


def _of_models(name: str, config: "ReproduceConfig", output: Path) -> int:
    from picbench.papers.accuracy import AccuracyRun, read_accuracy, write_accuracy

    others = ("figures", "model", "requests", "seeds", "seconds", "part")
    _refuse(config, others, f"{name} has `models`, `rows` and `data`")
    found = read_accuracy(Path(config.settings) if config.settings else None, name)
    found = found.model_copy(update={"rows": config.rows} if config.rows else {})
    named = config.models
    models = [one.strip() for one in named.split(",")] if named else found.models
    plan = AccuracyRun(
        found, models, config.device, output, config.data, config.texts, config.commit
    )
    if config.dry_run:
        return _print_estimates("model", plan.estimates(), _DRY)
    plan.run()
    write_accuracy(found, output, config.scores)
    click.echo((output / "README.md").read_text(encoding="utf-8"), file=sys.stdout)
    click.echo(output / "README.md")
    return 0


def _print_estimates(first: str, estimates: Iterable["Estimate"], heading: str) -> int:
    """Print what is left of experiments, or of models, as `first` says."""
    from picbench.run.result import print_all
    from picbench.run.schedule import minutes
    from picbench.tables.table import Column, Shown, Table, Value

    found = list(estimates)
    columns = [Column(name) for name in (first, "left", "prompt tokens", "time left\nmin:s")]
    rows: list[list[Value]] = [
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
    from picbench.run.schedule import Progress
    from picbench.run.session import Services

    whole = plan.run(services or Services(), partial(Progress, stream=sys.stderr))
    with locked(plan.output / "README.md"):
        write_page(plan.name, plan.settings, plan.output, plan.config.scores)
    page = plan.output / "README.md"
    click.echo(page.read_text(encoding="utf-8"), file=sys.stdout)
    if not whole:
        heading = "time is over; the same command continues with what is left here"
        _print_estimates("experiment", estimate(plan), heading)
    click.echo(page)
    return 0
