"""Runs experiments: cells of arms in rounds, interleaved, kept round by round, within a time.

An experiment has engines, which are up at once, each in a process of its own, and cells. A round
serves a cell: all of its arms in turn, another one first in each round. A record keeps each round;
one in a file is continued by the next call.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter, methodcaller
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any, Generic, Protocol, TypeVar

from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, Text
from picbench.errors import PicBenchError
from picbench.files import write_json
from picbench.run.arm import ArmServer, open_fleet
from picbench.run.measurements import InRounds, Measured, Outcome, Served
from picbench.run.server import Server
from picbench.store import provenance
from picbench.tables import page as pages
from picbench.workloads import models

T = TypeVar("T")
S = TypeVar("S", bound=Measured)
R = TypeVar("R", bound=InRounds)

#: Engines that are up, by name, what each is, and what starts one that writes to a log.
Engines = Mapping[str, ArmServer]
Described = Mapping[str, Mapping[str, object]]
Launcher = Callable[[str, EngineConfig, Path], ArmServer]

#: From an engine and a name that no other round has to figures by name. It runs in the engine's
#: process, so it must be a function of a module.
Measure = Callable[[Engine, str], Mapping[str, float]]

#: Shows a line; `say` does so at once.
Say = Callable[[str], object]
say = partial(print, flush=True)

#: The exit code where rounds are left.
UNFINISHED = 4


@contextmanager
def started_engines(
    configs: Mapping[str, EngineConfig], launcher: Launcher | None = None
) -> Iterator[tuple[Engines, Described]]:
    """Start engines; yield them and each one's `describe()`. They end when the context does.

    Raises the error of an engine that cannot start.
    """
    start = launcher or Server
    with TemporaryDirectory(prefix="picbench-") as logs:
        starts = {
            name: partial(start, name, config, Path(logs) / f"{name}.log")
            for name, config in configs.items()
        }
        with open_fleet(starts, lambda _: None) as fleet:
            yield fleet.servers, fleet.engines


def random_tokens(count: int, name: str, vocabulary: int = 1000) -> tuple[int, ...]:
    """`count` tokens that belong to `name`; not the vocabulary's first 16, often special ones."""
    source = Random(name)
    return tuple(source.randrange(16, vocabulary) for _ in range(count))


def random_text(count: int, name: str) -> Text:
    """A text of random tokens that belong to `name`."""
    return Text(tokens=random_tokens(count, name))


def random_chunks(count: int, length: int, name: str) -> list[Chunk]:
    """Chunks of `length` random tokens each, which belong to `name`."""
    return [Chunk(tokens=random_tokens(length, f"{name} {i}")) for i in range(count)]


def share(items: Sequence[T], part: tuple[int, int]) -> Sequence[T]:
    """The k-th of n shares of equal size, `part` being (k, n) and k counted from 1."""
    return items[part[0] - 1 :: part[1]]


@dataclass(frozen=True, slots=True)
class ServedArm:
    """The engine that serves an arm, and what is measured there.

    `warm_up` is called before the first round of each process, and its figures are dropped.
    """

    engine: str
    measure: Measure
    warm_up: Measure | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """What is served in a round.

    `seconds` is about what a round takes, for as long as none was measured. Cells of a lower `rank`
    come first. `most` is how many rounds are enough, if not all of the plan's. A cell that is
    served in another way overrides `serve`.
    """

    name: str
    arms: Mapping[str, ServedArm] = field(default_factory=dict)
    seconds: float = 1.0
    rank: int = 0
    most: int | None = None

    def warm_up(self, engines: Engines) -> None:
        """Prepare for the first round that this process serves."""
        for arm in self.arms.values():
            if arm.warm_up is not None:
                engines[arm.engine].call(partial(_apply, arm.warm_up, f"{self.name} 0"))

    def serve(self, engines: Engines, number: int) -> Mapping[str, Mapping[str, Any]]:
        """Serve a round, whose numbers begin at 1: figures by arm and name."""
        names = list(self.arms)
        first, found = number % len(names), dict[str, Mapping[str, Any]]()
        for name in (*names[first:], *names[:first]):
            arm = self.arms[name]
            work = partial(_apply, arm.measure, f"{self.name} {number}")
            found[name] = engines[arm.engine].call(work)
        return {name: found[name] for name in names}


def _apply(measure: Measure, name: str, engine: Engine) -> Mapping[str, float]:
    return measure(engine, name)


class TimeBudget:
    """Seconds that may be spent (0: no limit); `clock` gives seconds."""

    def __init__(self, seconds: float = 0.0, clock: Callable[[], float] = monotonic) -> None:
        self._seconds, self._clock, self._began = seconds, clock, clock()
        self.stopped = False

    @property
    def spent(self) -> float:
        """Seconds since the beginning."""
        return self._clock() - self._began

    def fits(self, seconds: float) -> bool:
        """Whether work of this many seconds would end in time."""
        return not self._seconds or self.spent + seconds <= self._seconds

    def allows(self, expected: float, start: float = 0.0) -> bool:
        """Whether work may begin, after engines have started; after a refusal nothing may."""
        self.stopped |= not self.fits(start + expected)
        return not self.stopped


#: Figures of rounds by arm and name.
Found = dict[str, dict[str, list[Any]]]


class CellRecord(Protocol):
    """What is kept of the rounds of an experiment, in memory or in a file of any format."""

    @property
    def seconds(self) -> Mapping[str, Sequence[float]]:
        """What each round took that is done, by cell."""

    @property
    def start(self) -> float | None:
        """Seconds that the engines took to start the last time, None if that is not known."""

    def begin(self, engines: Engines, described: Described, seconds: float) -> None:
        """Engines are up after this many seconds. Raises IncomparableRuns for other ones."""

    def note(self, cell: Cell, number: int, figures: Mapping[str, Any], seconds: float) -> None:
        """Keep a round, and in it what its cell served."""

    def fail(self, cell: Cell, error: PicBenchError) -> None:
        """Keep, or raise, the error of a cell, which is not tried again before the next call."""


#: What a record's file has beside its facts.
_KEPT = ("cells", "seconds", "compiled", "starts", "failures")


@dataclass(slots=True)
class RoundsRecord:
    """Figures by cell, arm and name, round by round; in a JSON file, if `path` names one.

    `compiled` has the kernels, by engine, that were compiled after it was ready, `starts` the
    seconds of each start of all engines, `failures` the error of each cell whose last attempt
    failed; without a file the first one is raised. `keep` is called after each round.
    """

    path: Path | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    cells: dict[str, Found] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    compiled: dict[str, list[str]] = field(default_factory=dict)
    starts: list[float] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    keep: Callable[["RoundsRecord"], object] = lambda _: None
    _engines: Engines = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, facts: Mapping[str, Any]) -> "RoundsRecord":
        """What a file has of rounds with these facts; nothing if it was measured with others."""
        if not path.exists() or differing(path, facts):
            return cls(path, facts)
        known = json.loads(path.read_bytes())
        return cls(path, facts, **{name: known[name] for name in _KEPT if name in known})

    @property
    def start(self) -> float | None:
        """See `CellRecord`."""
        return self.starts[-1] if self.starts else None

    @property
    def found(self) -> Found:
        """Figures by arm and name, those of all cells together."""
        found: Found = {}
        for cell in self.cells.values():
            for arm, figures in cell.items():
                for name, values in figures.items():
                    found.setdefault(arm, {}).setdefault(name, []).extend(values)
        return found

    def begin(self, engines: Engines, described: Described, seconds: float) -> None:
        """Note which kernels engines compile from now on."""
        self._engines = engines
        self.starts.append(round(seconds, 1))
        for engine in engines.values():
            engine.call(methodcaller("watch_compilations"))

    def note(self, cell: Cell, number: int, figures: Mapping[str, Any], seconds: float) -> None:
        """Add a round of a cell, and write the file."""
        self.add(cell.name, figures, seconds)
        for name, engine in self._engines.items():
            kernels = engine.call(attrgetter("compilations"))
            self.compiled[name] = sorted({*self.compiled.get(name, ()), *kernels})
        self.write()

    def add(self, cell: str, figures: Mapping[str, Mapping[str, Any]], seconds: float) -> None:
        """Add a round of a cell, which no longer fails."""
        known = self.cells.setdefault(cell, {})
        for arm, values in figures.items():
            for name, value in values.items():
                known.setdefault(arm, {}).setdefault(name, []).append(value)
        self.seconds.setdefault(cell, []).append(seconds)
        self.failures.pop(cell, None)

    def fail(self, cell: Cell, error: PicBenchError) -> None:
        """Keep the error, with the end of the engine's log; raise it where there is no file."""
        if self.path is None:
            raise error
        self.failures[cell.name] = "\n".join([str(error), *getattr(error, "__notes__", ())])
        self.write()

    def write(self) -> None:
        """Write the file, and what is made of it."""
        if self.path is not None:
            provenance.write_code(self.path.parent, self.facts)
            kept = {name: getattr(self, name) for name in _KEPT}
            write_json(self.path, {"schema": 1, "provenance": self.facts, **kept})
        self.keep(self)


def differing(path: Path, facts: Mapping[str, Any]) -> list[str]:
    """Names of facts that differ from the file's; any discards it."""
    before = json.loads(path.read_bytes())["provenance"] if path.exists() else facts
    now = json.loads(json.dumps(facts))
    return sorted(name for name in {**before, **now} if before.get(name) != now.get(name))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentPlan:
    """Cells to measure for `rounds` rounds, with these engines.

    `name` is that of the files, `facts` what they say of where it was measured. All cells get `few`
    rounds before any gets more: by default the fewest that show a spread. `part` is the share of
    the cells that this process serves. A plan with another order overrides `left`.
    """

    name: str
    facts: Mapping[str, Any]
    engines: Mapping[str, EngineConfig]
    cells: Sequence[Cell]
    rounds: int
    few: int = 3
    part: tuple[int, int] = (1, 1)

    @property
    def own(self) -> Sequence[Cell]:
        """The cells that this process serves."""
        return share(self.cells, self.part)

    def wanted(self, cell: Cell) -> int:
        """Rounds of a cell."""
        return min(self.rounds, cell.most or self.rounds)

    def left(self, record: CellRecord) -> Iterator[tuple[int, Cell]]:
        """Number of the round, from 1, and cell, in the order in which they are measured.

        Cells of one rank come in a random order, so that whatever a call gets done is even.
        """
        left = []
        for number in range(1, self.rounds + 1):
            for cell in Random(number).sample(self.own, len(self.own)):
                if rounds_of(record, cell) < number <= self.wanted(cell):
                    left.append((number, cell))
        yield from sorted(left, key=lambda each: (each[0] > self.few, each[1].rank, each[0]))

    def done(self, record: CellRecord) -> bool:
        """Whether nothing is left."""
        return all(rounds_of(record, cell) >= self.wanted(cell) for cell in self.own)

    def expected(self, cell: Cell, record: CellRecord) -> float:
        """Seconds that a round takes; before any is measured a guess, corrected by other cells'."""
        if known := record.seconds.get(cell.name):
            return max(known)
        spent = sum(sum(record.seconds.get(c.name, ())) for c in self.cells)
        guessed = sum(c.seconds * rounds_of(record, c) for c in self.cells)
        return cell.seconds * (spent / guessed if guessed else 1.0)

    def progress(self, record: CellRecord) -> str:
        """What is done, and how long the rest may take."""
        missing = {c.name: max(0, self.wanted(c) - rounds_of(record, c)) for c in self.own}
        total = sum(map(self.wanted, self.own))
        left = sum(missing[cell.name] * self.expected(cell, record) for cell in self.own)
        start = "" if record.start is None else f" ({record.start:,.0f} s)"
        done = f"{total - sum(missing.values())} of {total} cells measured"
        return f"{done}; left: about {left:,.0f} s, and the engines' start{start}"


def rounds_of(record: CellRecord, cell: Cell) -> int:
    """Rounds of a cell that are done."""
    return len(record.seconds.get(cell.name, ()))


def interleaved(
    name: str,
    facts: Mapping[str, Any],
    engines: Mapping[str, EngineConfig],
    measures: Mapping[str, Measure],
    rounds: int,
    *,
    warm_up: bool = True,
) -> ExperimentPlan:
    """A cell for each measure, one after another, all engines in turn.

    A round that is not kept warms each of them up, unless they need no `warm_up`.
    """
    cells = []
    for rank, (label, work) in enumerate(measures.items()):
        arms = {arm: ServedArm(arm, work, work if warm_up else None) for arm in engines}
        cells.append(Cell(label, arms, rank=rank))
    return ExperimentPlan(
        name=name, facts=facts, engines=engines, cells=cells, rounds=rounds, few=rounds
    )


def run(
    plan: ExperimentPlan,
    record: CellRecord,
    say: Say,
    budget: TimeBudget | None = None,
    launcher: Launcher | None = None,
) -> None:
    """Measure what is left, as long as there is time, and keep it round by round.

    No cell is begun that would not end within the budget, in which the start of engines counts.
    Raises the error of an engine that cannot start, and what the record raises.
    """
    say(plan.progress(record))
    if plan.done(record):
        return
    budget = budget or TimeBudget()
    before = budget.spent
    with started_engines(plan.engines, launcher) as (engines, described):
        took = budget.spent - before
        record.begin(engines, described, took)
        say(f"engines are up, {took:,.0f} s")
        tried, failed = set[str](), set[str]()
        for number, cell in plan.left(record):
            if cell.name in failed or not budget.fits(plan.expected(cell, record)):
                continue
            try:
                if cell.name not in tried:
                    tried.add(cell.name)
                    cell.warm_up(engines)
                before = budget.spent
                figures = cell.serve(engines, number)
                record.note(cell, number, figures, budget.spent - before)
            except PicBenchError as error:
                failed.add(cell.name)
                record.fail(cell, error)
                outcome = f"failed, {error}"
            else:
                outcome = "done"
            say(f"{cell.name}, round {number}: {outcome}, {budget.spent:,.0f} s")
    say(plan.progress(record))


def engine_of(settings: Served, **wanted: Any) -> EngineConfig:
    """An engine of the model that is served, without tiers if none are `wanted`."""
    given = {
        "model": str(models.resolve(settings.served).path),
        "device": settings.device,
        "dtype": settings.served_dtype,
        "tiers": "",
    }
    return EngineConfig(**given | wanted)


def facts_of(settings: Served) -> dict[str, Any]:
    """The machine, versions, the measured code, and the model."""
    found = provenance.facts(*provenance.ENGINE, device=settings.device, commit=settings.commit)
    model = models.resolve(settings.served).label
    return found | {"model": model, "dtype": settings.served_dtype}


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment(Generic[S]):
    """A measurement of arms in turn, all of it in one call.

    Figures become `tables`, and `ratios` that the summary keeps; `about` is formatted with the
    facts, `sentences` with the ratios. `check` comes first, and raises InvalidRun.
    """

    plan: Callable[[S], ExperimentPlan]
    title: str
    about: str
    tables: Sequence[pages.DrawnTable]
    ratios: Sequence[pages.FigureRatio] = ()
    sentences: Sequence[str] = ()
    check: Callable[[S], object] = lambda _: None

    def measure(self, settings: S) -> Outcome:
        """Check, then measure; write data, page and the summary's figures after each round."""
        self.check(settings)
        plan = self.plan(settings)

        def write(record: RoundsRecord) -> None:
            document = {"schema": 1, "provenance": plan.facts, "found": record.found}
            pages.save(settings.output / plan.name, document, self.render(record.found, plan.facts))
            if figures := pages.ratio_figures(self.ratios, record.found):
                pages.update_summary(settings.output, figures)

        record = RoundsRecord(keep=write)
        run(plan, record, say)
        return Outcome(self.render(record.found, plan.facts))

    def render(self, found: pages.Found, facts: Mapping[str, Any]) -> str:
        """The page, in Markdown, of all that is measured."""
        figures: dict[str, float] = {}
        for group in pages.ratio_figures(self.ratios, found).values():
            figures |= group
        said = "\n".join(pages.filled(self.sentences, figures))
        tables = (each(found) for each in self.tables)
        return pages.page(self.title, self.about.format(**facts), *tables, said)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsExperiment(Generic[R]):
    """A measurement in rounds that the next call continues.

    `render` makes the page of all that is measured, "" before there is anything to say; `figures`
    are those for the summary. `draw`, if any, draws what belongs to the page.
    """

    plan: Callable[[R], ExperimentPlan]
    render: Callable[[RoundsRecord], str]
    figures: Callable[[RoundsRecord], Mapping[str, Any]] = lambda _: {}
    draw: Callable[[RoundsRecord, Path], object] = lambda _, __: None

    def measure(self, settings: R) -> Outcome:
        """Measure what is left, and write file, page and figures after each round.

        Where an estimate is asked for, it is the page, and nothing is measured.
        """
        budget = TimeBudget(settings.seconds)
        plan = self.plan(settings)
        path = settings.output / f"{plan.name}.json"
        record = RoundsRecord.read(path, plan.facts)
        record.keep = self.write
        if settings.estimate:
            return Outcome(plan.progress(record))
        if other := differing(path, plan.facts):
            say(f"{path.name} was measured with another {', '.join(other)}: started over")
        run(plan, record, say, budget)
        return Outcome(self.write(record), 0 if plan.done(record) else UNFINISHED)

    def write(self, record: RoundsRecord) -> str:
        """Write the page beside the record's file, and the summary's figures; the page."""
        assert record.path is not None
        base = record.path.with_suffix("")
        if found := self.render(record):
            pages.write_page(base, found)
            self.draw(record, base)
            if figures := self.figures(record):
                pages.update_summary(base.parent, figures)
        return found
