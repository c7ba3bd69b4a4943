"""Where position-independent caching pays: the grid measured, and mepic's ratios to other arms.

A cell of the runner is traffic of one seed, which every arm serves with a cold cache and then with
a warm one. The page compares the arms cell by cell and seed by seed.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from statistics import fmean, median

import numpy as np

from picbench.errors import IncomparableRuns
from picbench.experiments import grid
from picbench.figures.frontier import RatioPanel, draw_ratios
from picbench.files import locked, write_whole
from picbench.profile.predictor import (
    ALONE,
    BURST,
    ArmCell,
    GridFacts,
    GridPoint,
    GridPredictor,
    MeasuredCell,
    MeasuredGrid,
    read_grid,
    write_grid,
)
from picbench.run import runner
from picbench.run.measurements import BreakEven, Outcome
from picbench.tables.page import page, paragraphs, update_summary
from picbench.tables.table import NOTHING, table

#: The arm that is judged, and those that it is compared with.
SUBJECT, RIVALS = "mepic", ("prefix", "reorder")

#: A commit's whole id: its first letters say enough in a caption.
_COMMIT = re.compile(r"\b([0-9a-f]{7})[0-9a-f]{33}\b")

#: What traffic of a row is.
_TRAFFIC = ("chunks", "tokens a chunk", "prompt", "corpus", "reply", "load", "cache")


def measure(settings: BreakEven, launcher: runner.Launcher | None = None) -> Outcome:
    """Measure what is left of the device's grid, as long as there is time, and write its page."""
    planned = grid.read_grids()[settings.device]
    serving, path = grid.GridEngines(settings.device), settings.output / "grid.json"
    cells = [
        ServedTraffic(
            f"{traffic.point}, seed {traffic.seed}",
            seconds=planned.seconds(traffic.point),
            rank=planned.stage(traffic).rank,
            traffic=traffic,
            settings=planned,
            serving=serving,
        )
        for traffic in grid.plan_grid(planned)
    ]
    plan = GridPlan(
        name="grid",
        facts={},
        engines=serving.configs(settings, planned),
        cells=cells,
        rounds=1,
        part=settings.part,
    )
    record = GridRecord(path, cells, partial(serving.facts, settings, planned))
    if settings.dry_run:
        return Outcome(str(plan.progress(record)))
    if not settings.page:
        runner.run(plan, record, runner.say, runner.TimeBudget(settings.seconds), launcher)
    measured = read_grid(path)
    write_page(measured, settings.output, interpolation(measured, planned))
    return Outcome(code=0 if settings.page or plan.done(record) else runner.UNFINISHED)


@dataclass(frozen=True, slots=True)
class ServedTraffic(runner.Cell):
    """Traffic as a cell of the runner; its rank is that of its stage."""

    traffic: grid.GridTraffic = field(kw_only=True)
    settings: grid.GridSettings = field(kw_only=True)
    serving: grid.GridEngines = field(kw_only=True)

    def serve(self, engines: runner.Engines, number: int) -> Mapping[str, Mapping[str, ArmCell]]:
        """Serve the traffic under each arm, in a random order: a cell for either cache."""
        batches, running = grid.draw_traffic(self.traffic, self.settings), self.settings.running
        at_once = 1 if self.traffic.point.load == ALONE else running
        arms = self.settings.arms_at(self.traffic.point)
        found: dict[str, Mapping[str, ArmCell]] = {}
        for arm in Random(f"{self.traffic}").sample(arms, len(arms)):
            cold, warm = self.serving.serve(engines, arm, batches, at_once, running)
            found[arm] = {"cold": cold, "warm": warm}
        return {arm: found[arm] for arm in arms}


class GridPlan(runner.ExperimentPlan):
    """Cells in stages; after each, those are measured again that something else disturbed."""

    def left(self, record: runner.CellRecord) -> Iterator[tuple[int, runner.Cell]]:
        """See `ExperimentPlan`."""
        assert isinstance(record, GridRecord)
        for rank in sorted({cell.rank for cell in self.own}):
            own = [cell for cell in self.own if cell.rank == rank]
            yield from ((1, cell) for cell in own if not runner.rounds_of(record, cell))
            disturbed = record.disturbed()
            yield from ((1, cell) for cell in own if cell.name in disturbed)


class GridRecord(grid.FactsRecord):
    """The grid of a file."""

    def __init__(
        self,
        path: Path,
        cells: Sequence[ServedTraffic],
        facts: Callable[[runner.Described], GridFacts],
    ) -> None:
        super().__init__(path, facts)
        self._traffic = {cell.name: cell.traffic for cell in cells}
        if path.exists():
            self._count(read_grid(path))

    def join(self, facts: GridFacts) -> None:
        """See `FactsRecord`."""
        self._facts = facts
        self._count(add_cells(self.path, facts, ()))

    def note(
        self,
        cell: runner.Cell,
        number: int,
        figures: Mapping[str, Mapping[str, ArmCell]],
        seconds: float,
    ) -> None:
        """Add the cells of a traffic to the file."""
        cells = []
        for point, seed in self._traffic[cell.name].keys:
            arms = {arm: found[point.cache] for arm, found in figures.items()}
            cells.append(MeasuredCell(point, seed, arms, seconds / 2))
        self._count(add_cells(self.path, self._facts, cells))

    def disturbed(self) -> set[str]:
        """The cells that something else disturbed when they were measured."""
        found = {cell.key for cell in self._cells if cell.disturbed}
        return {name for name, traffic in self._traffic.items() if found & {*traffic.keys}}

    def _count(self, measured: MeasuredGrid) -> None:
        self._cells = measured.cells
        took = {cell.key: cell.seconds for cell in measured.cells}
        self.seconds = {
            name: [sum(took.get(key, 0.0) for key in traffic.keys)]
            for name, traffic in self._traffic.items()
            if traffic.keys[0] in took
        }


def add_cells(path: Path, facts: GridFacts, cells: Sequence[MeasuredCell]) -> MeasuredGrid:
    """Add cells to a file that other processes may add to, too; the grid that it has then.

    Where the file has a cell already, the one that was disturbed less is kept. Raises
    IncomparableRuns if the file has cells of other hardware, versions or models.
    """
    with locked(path):
        known = read_grid(path) if path.exists() else None
        if known is None or not known.cells:
            known = MeasuredGrid(facts, [])
        if known.facts.graph_warning(facts, "here"):
            raise IncomparableRuns(
                f"{path}: was measured with {known.facts.graphs()}, here are {facts.graphs()}",
                hint="name another `output`",
            )
        # They are measured on several days.
        grid.refuse_other_engines(path, known.facts, facts, ("commit", "graph_tokens"))
        kept, commits = {cell.key: cell for cell in known.cells}, known.facts.versions["commit"]
        for cell in cells:
            if cell.key not in kept or cell.quiet > kept[cell.key].quiet:
                kept[cell.key] = cell
                both = [*commits.split(", "), facts.versions["commit"]]
                commits = ", ".join(dict.fromkeys(both))
        versions = {**known.facts.versions, "commit": commits}
        found = MeasuredGrid(replace(known.facts, versions=versions), list(kept.values()))
        write_grid(path, found)
    return found


@dataclass(frozen=True, slots=True)
class Quantity:
    """A figure of an arm that is less where it is better, under some loads."""

    name: str
    text: str
    value: Callable[[ArmCell], float]
    loads: Callable[[str], bool]


#: What is compared; requests a second as their inverse.
QUANTITIES = (
    Quantity("ttft", "TTFT", lambda cell: cell.ttft_s, lambda load: load != BURST),
    Quantity("throughput", "seconds a request", lambda c: 1 / c.requests_s, lambda x: x == BURST),
    Quantity("kv", "peak KV blocks", lambda cell: cell.peak_blocks, lambda load: load != ALONE),
)


@dataclass(frozen=True, slots=True)
class SeedRatios:
    """mepic's figure over a rival's at a point, one ratio for each seed; `middle` is the median.

    Below 1 mepic is better.
    """

    point: GridPoint
    quantity: Quantity
    rival: str
    ratios: tuple[float, ...]
    middle: float


def find_ratios(measured: MeasuredGrid) -> list[SeedRatios]:
    """All ratios of a grid: quantity by quantity, rival by rival, point by point."""
    points, found = measured.points(), []
    for quantity, rival in product(QUANTITIES, RIVALS):
        for point, cells in points.items():
            if quantity.loads(point.load):
                # Where `reorder` was not served, it would have sent what `prefix` did.
                others = [cell.arms.get(rival) or cell.arms["prefix"] for cell in cells]
                own = [cell.arms[SUBJECT] for cell in cells]
                pairs = zip(own, others, strict=True)
                ratios = tuple(quantity.value(one) / quantity.value(two) for one, two in pairs)
                found.append(SeedRatios(point, quantity, rival, ratios, median(ratios)))
    return found


@dataclass(frozen=True, slots=True)
class ChosenTime:
    """A time of `auto`, and of mepic, over the better of `RIVALS` at a point: medians of seeds."""

    point: GridPoint
    quantity: Quantity
    auto: float
    mepic: float
    ratios: tuple[float, ...]


def find_chosen(measured: MeasuredGrid) -> list[ChosenTime]:
    """All times of the points that `auto` was served at."""
    found, (*times, _) = [], QUANTITIES
    for quantity, (point, cells) in product(times, measured.points().items()):
        own = [cell.arms for cell in cells if grid.AUTO in cell.arms]
        if not own or not quantity.loads(point.load):
            continue
        best = [min(quantity.value(arms[r]) for r in RIVALS if r in arms) for arms in own]
        both = {
            arm: tuple(quantity.value(a[arm]) / other for a, other in zip(own, best, strict=True))
            for arm in (grid.AUTO, SUBJECT)
        }
        middles = median(both[grid.AUTO]), median(both[SUBJECT])
        found.append(ChosenTime(point, quantity, *middles, both[grid.AUTO]))
    return found


@dataclass(frozen=True, slots=True)
class Choosing:
    """How well `auto` chose: of so many `cells`, it was over 3 % slower than the better rival in
    some, by `worst` at most; where mepic wins, it kept this share of the gain.
    """

    cells: int
    lost_over_3_percent: int
    worst: float
    kept_of_gain: float

    @classmethod
    def of(cls, chosen: Sequence[ChosenTime]) -> "Choosing":
        """Judge times, of which there is one at least; without a gain all of it is kept."""
        gain = sum(1 - one.mepic for one in chosen if one.mepic < 1)
        kept = sum(1 - one.auto for one in chosen if one.mepic < 1)
        lost, worst = sum(one.auto > 1.03 for one in chosen), max(one.auto for one in chosen)
        return cls(len(chosen), lost, worst, kept / gain if gain else 1.0)


def crossing(ratios: Mapping[float, float]) -> float | None:
    """The least reuse from which on mepic is better, by a straight line between the points.

    `ratios` are by reuse. 0 where it always is, None where it is not better at the most reuse.
    """
    reuses = sorted(ratios)
    if not reuses or ratios[reuses[-1]] >= 1:
        return None
    better = reuses[-1]
    for low in reversed(reuses[:-1]):
        if ratios[low] >= 1:
            share = (ratios[low] - 1) / (ratios[low] - ratios[better])
            return low + share * (better - low)
        better = low
    return 0.0


#: The crossings of traffic, at any reuse, by a figure and a rival.
_Crossings = Mapping[tuple[GridPoint, str, str], float | None]


def _crossings(ratios: Sequence[SeedRatios]) -> _Crossings:
    """Those of traffic of which several reuses were measured."""
    found: dict[tuple[GridPoint, str, str], dict[float, float]] = {}
    for one in ratios:
        key = replace(one.point, reuse=0.0), one.quantity.name, one.rival
        found.setdefault(key, {})[one.point.reuse] = one.middle
    return {key: crossing(column) for key, column in found.items() if len(column) > 1}


def write_page(measured: MeasuredGrid, output: Path, notes: Sequence[str] = ()) -> str:
    """Write ``README.md`` and a figure for each quantity; the page. `notes` end it.

    ``summary.json`` beside it has how well `auto` chose, if it was served.
    """
    ratios = find_ratios(measured)
    if chosen := find_chosen(measured):
        update_summary(output, {"auto": asdict(Choosing.of(chosen))})
    text = render_page(measured, ratios, "\n".join(_draw(measured, ratios, output)), notes)
    write_whole(output / "README.md", text.encode())
    return text


def _draw(measured: MeasuredGrid, ratios: Sequence[SeedRatios], output: Path) -> Iterator[str]:
    """Draw a figure for each quantity and cache that was measured; a link to each.

    It has the corpus, the load and the reply that most points have.
    """
    for quantity, cache in product(QUANTITIES, ("cold", "warm")):
        panels, shown = [], list[SeedRatios]()
        for rival in RIVALS:
            wanted = quantity.name, rival, cache
            own = [r for r in ratios if (r.quantity.name, r.rival, r.point.cache) == wanted]
            loads = [(r.point.load, r.point.corpus, r.point.output) for r in own]
            usual = Counter(loads).most_common(1)
            own = [r for r, load in zip(own, loads, strict=True) if load == usual[0][0]]
            shown = shown or own
            values = {
                (r.point.reuse, (r.point.chunks, r.point.chunk_tokens)): r.middle for r in own
            }
            panels.append(RatioPanel(f"against {rival}", values))
        if not shown:
            continue
        point, seeds = shown[0].point, sorted({len(found.ratios) for found in shown})
        counts = " to ".join(str(count) for count in dict.fromkeys((seeds[0], seeds[-1])))
        caption = (
            f"{SUBJECT}'s {quantity.text} over another arm's; below 1, in blue and within the "
            f"line, {SUBJECT} is better. Load: {_load(point)}, {cache} cache, corpus of "
            f"{point.corpus} chunks, replies of {point.output} tokens; median, n={counts}. "
        )
        name = f"{quantity.name}-{cache}"
        draw_ratios(panels, caption + _COMMIT.sub(r"\1", measured.about()), output / name)
        yield f"![{SUBJECT}'s {quantity.text} over another arm's, {cache} cache]({name}.svg)"


def render_page(
    measured: MeasuredGrid, ratios: Sequence[SeedRatios], figures: str, notes: Sequence[str]
) -> str:
    """The page, in Markdown; `figures` are links."""
    return page(
        "Break-even: where position-independent caching pays",
        measured.about(),
        f"{_counted(measured)}. Engines: {measured.facts.graphs()}. Prompts are chunks of "
        "random tokens between short texts: times and memory, not answers. Reuse is the share "
        "of chunk tokens in chunks of the corpus, all others occur once; a cold cache is empty "
        "before the first request, a warm one has served all chunks of the corpus that are "
        "needed (of a corpus larger than the pool, as many as fit), each as the first of a "
        "prompt, and as many requests of the same kind. "
        f"`alone` is one request at a time, `burst` {measured.facts.running} at a time. Ratios are "
        f"{SUBJECT}'s figure over the other arm's in the same cell, seed by seed."
        f"{_caveats(measured)}",
        "## From which reuse on",
        f"The least reuse at which `{SUBJECT}` is better, between the points by a straight "
        "line. `never` is: not at the most reuse either.",
        _crossing_table(ratios),
        figures,
        f"## Where `{SUBJECT}` loses",
        _losses(ratios),
        _choices(find_chosen(measured)),
        *notes,
    )


def _counted(measured: MeasuredGrid) -> str:
    """How many cells have how many seeds."""
    points = measured.points()
    counts = Counter(len(cells) for cells in points.values())
    seeds = ", ".join(
        f"{cells if len(counts) > 1 else 'all'} with {seeds} seed{'s' * (seeds > 1)}"
        for seeds, cells in sorted(counts.items())
    )
    return f"{len(points)} cells, {len(measured.cells)} with repeats: {seeds}"


def _caveats(measured: MeasuredGrid) -> str:
    """What stands for rivals that some cells do not have; how quiet the host was, if known."""
    text = ""
    if any(rival not in cell.arms for rival in RIVALS for cell in measured.cells):
        text = " Where no chunk recurs `reorder` sends what `prefix` does, and has its figures."
    alone = [cell for cell in measured.cells if cell.point.load == ALONE]
    known = [a.quiet for cell in alone for a in cell.arms.values() if a.quiet is not None]
    if known:
        text += f" {fmean(known):.0%} of the requests alone began on a core that nothing else used."
    return text


def _traffic(point: GridPoint) -> tuple[str, ...]:
    """A point in the columns `_TRAFFIC`."""
    sizes = point.chunks, point.chunk_tokens, point.prompt, point.corpus, point.output
    return *(f"{size:,}" for size in sizes), _load(point), point.cache


def _load(point: GridPoint) -> str:
    return point.load if point.load[0].isalpha() else f"{point.load} a second"


def _losses(ratios: Sequence[SeedRatios]) -> str:
    lost = sorted((r for r in ratios if r.middle > 1), key=lambda r: -r.middle)
    if not lost:
        return "In no cell that was measured."
    rows = []
    for found in lost:
        low, high = min(found.ratios), max(found.ratios)
        rows.append(
            (
                *(found.quantity.text, found.rival, f"{found.point.reuse:.0%}"),
                *_traffic(found.point),
                _spread(found.middle, found.ratios),
                "yes" if high < 1 or low > 1 else "no",
            )
        )
    head = ("figure", "against", "reuse", *_TRAFFIC, "ratio, median (range)", "all seeds agree")
    share = f"{len(lost)} of {len(ratios)} comparisons, the largest loss first."
    return paragraphs(share, table(head, rows, right=2))


def _choices(chosen: Sequence[ChosenTime]) -> str:
    """The section about `auto`; nothing where it was not served."""
    if not chosen:
        return ""
    found = Choosing.of(chosen)
    rows = [
        (
            *(one.quantity.text, f"{one.point.reuse:.0%}", *_traffic(one.point)),
            *(_spread(one.auto, one.ratios), f"{one.mepic:.2f}"),
        )
        for one in sorted(chosen, key=lambda one: -one.auto)
        if one.auto > 1.03
    ]
    head = ("figure", "reuse", *_TRAFFIC, "auto, median (range)", "mepic")
    return paragraphs(
        f"## `{grid.AUTO}` and the better of {' and '.join(RIVALS)}",
        f"Times of `{grid.AUTO}` over those of the better one, seed by seed. More than 3 % slower "
        f"in {found.lost_over_3_percent} of {found.cells} cells, {found.worst:.2f} at most. Where "
        f"`{SUBJECT}` is the sooner one, `{grid.AUTO}` keeps {found.kept_of_gain:.2f} of the gain "
        "(the sum of what is saved of the better one's times).",
        table(head, rows, right=1) if rows else "",
    )


def _spread(middle: float, ratios: Sequence[float]) -> str:
    return f"{middle:.2f} ({min(ratios):.2f} - {max(ratios):.2f}, n={len(ratios)})"


def _crossing_table(ratios: Sequence[SeedRatios]) -> str:
    """A row for each traffic of which several reuses were measured."""
    columns, found = list(product(QUANTITIES, RIVALS)), _crossings(ratios)
    rows = []
    for point in dict.fromkeys(point for point, _, _ in found):
        row = [*_traffic(point)]
        for quantity, rival in columns:
            key = point, quantity.name, rival
            reuse = found.get(key)
            never = "never" if key in found else NOTHING
            row.append(never if reuse is None else f"{reuse:.0%}")
        rows.append(row)
    return table((*_TRAFFIC, *(f"{q.text}, {rival}" for q, rival in columns)), rows, right=0)


def interpolation(measured: MeasuredGrid, settings: grid.GridSettings) -> tuple[str, ...]:
    """How well a grid predicts itself, and grids that end after a stage predict themselves."""
    ttft, requests_s = GridPredictor(measured).errors().texts()
    return (
        "## How well it interpolates",
        "Error of what `picbench profile` predicts for each traffic from all others: TTFT of "
        f"requests alone: {ttft}; requests a second in bursts: {requests_s}.",
        "The same of grids that end after a stage, and their crossings beside the whole one's:",
        stage_errors(measured, settings),
    )


def stage_errors(measured: MeasuredGrid, settings: grid.GridSettings) -> str:
    """A table with a row for each stage that has cells; its seconds are without engines' start."""
    planned = [settings.stage(traffic).rank for traffic in grid.plan_grid(settings)]
    traffic = [grid.GridTraffic(replace(c.point, cache="cold"), c.seed) for c in measured.cells]
    places = [settings.stage(each).rank for each in traffic]
    whole, rows = _crossings(find_ratios(measured)), []
    for place in sorted(set(places)):
        cells = [cell for cell, own in zip(measured.cells, places, strict=True) if own <= place]
        part = MeasuredGrid(measured.facts, cells)
        rows.append(
            (
                f"{list(grid.GridStage)[place]}",
                f"{len(cells)} of {2 * sum(own <= place for own in planned)}",
                f"{sum(cell.seconds for cell in cells):,.0f}",
                *GridPredictor(part).errors().texts(),
                _apart(_crossings(find_ratios(part)), whole),
            )
        )
    head = ("measured until", "cells", "seconds", "TTFT of requests alone", "requests a second")
    return table((*head, f"least reuse at which {SUBJECT} is better"), rows)


def _apart(found: _Crossings, whole: _Crossings) -> str:
    """How far crossings are from those of the whole grid."""
    pairs = [(found[key], whole[key]) for key in found if key in whole]
    both = [abs(a - b) for a, b in pairs if a is not None and b is not None]
    if not both:
        return "none"
    one_sided = sum((a is None) is not (b is None) for a, b in pairs)
    return (
        f"{len(pairs)} of {len(whole)}; 90 % within {100 * np.quantile(both, 0.9):.0f} points of "
        f"the whole grid's, {one_sided} only in one"
    )
