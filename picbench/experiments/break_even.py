"""Where position-independent caching pays: the grid measured, and mepic's ratios to other arms.

A cell of the runner is traffic of one seed, which every arm serves with a cold cache and then with
a warm one. The page compares the arms cell by cell and seed by seed.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from statistics import fmean, median

import numpy as np

from picbench.errors import IncomparableRuns, PicBenchError
from picbench.experiments.grid import (
    CellWork,
    GridEngines,
    GridSettings,
    GridStage,
    GridTraffic,
    draw_traffic,
    engine_config,
    grid_facts,
    plan_grid,
    read_grids,
    refuse_other_engines,
)
from picbench.figures.frontier import RatioPanel, draw_ratios
from picbench.files import locked, write_whole
from picbench.profile.grid import (
    ALONE,
    BURST,
    ArmCell,
    GridFacts,
    GridPoint,
    MeasuredCell,
    MeasuredGrid,
    read_grid,
    write_grid,
)
from picbench.profile.predictor import GridPredictor
from picbench.run.measurements import BreakEven, Outcome
from picbench.run.runner import (
    UNFINISHED,
    Cell,
    CellRecord,
    Described,
    Engines,
    ExperimentPlan,
    Launcher,
    Say,
    TimeBudget,
    rounds_of,
    run,
    say,
)
from picbench.tables.page import page, paragraphs
from picbench.tables.table import NOTHING, table

#: The arm that is judged, and those that it is compared with.
SUBJECT, RIVALS = "mepic", ("prefix", "reorder")

#: Whose cell is a rival's where it has none: it would have sent the same there.
_SAME = {"reorder": "prefix"}

#: Facts that cells of one grid may differ in: they are measured on several days.
_MAY_DIFFER = ("commit", "graph_tokens")

#: A commit's whole id: its first letters say enough in a caption.
_COMMIT = re.compile(r"\b([0-9a-f]{7})[0-9a-f]{33}\b")


def measure(settings: BreakEven, launcher: Launcher | None = None, say: Say = say) -> Outcome:
    """Measure what is left of the device's grid, as long as there is time, and write its page."""
    grid = read_grids()[settings.device]
    path = settings.output / "grid.json"
    plan = grid_plan(settings, grid)
    record = GridRecord(path, plan, partial(grid_facts, settings, grid, plan.serving))
    if settings.dry_run:
        return Outcome(str(plan.progress(record)))
    if not settings.page:
        run(plan, record, say, TimeBudget(settings.seconds), launcher)
    write_page(read_grid(path), settings.output, interpolation(read_grid(path), grid))
    return Outcome(code=0 if settings.page or plan.done(record) else UNFINISHED)


@dataclass(frozen=True, slots=True)
class ServedTraffic(Cell):
    """Traffic as a cell of the runner; its rank is that of its stage."""

    traffic: GridTraffic = field(kw_only=True)
    settings: GridSettings = field(kw_only=True)
    serving: GridEngines = field(kw_only=True)

    def serve(self, engines: Engines, number: int) -> Mapping[str, Mapping[str, ArmCell]]:
        """Serve the traffic under each arm, in a random order: a cell for either cache."""
        batches, settings = draw_traffic(self.traffic, self.settings), self.settings
        running = 1 if self.traffic.point.load == ALONE else settings.running
        arms = settings.arms_at(self.traffic.point)
        found: dict[str, Mapping[str, ArmCell]] = {}
        for arm in Random(f"{self.traffic}").sample(arms, len(arms)):
            stock = arm in self.serving.stock
            work = CellWork(arm, batches, running, stock, settings.running)
            cold, warm = self.serving.serve(engines, work)
            found[arm] = {"cold": cold, "warm": warm}
        return {arm: found[arm] for arm in arms}


@dataclass(frozen=True, slots=True, kw_only=True)
class GridPlan(ExperimentPlan):
    """Cells in stages; after each, those are measured again that something else disturbed."""

    serving: GridEngines

    def left(self, record: CellRecord) -> Iterator[tuple[int, Cell]]:
        """See `ExperimentPlan`."""
        assert isinstance(record, GridRecord)
        for rank in sorted({cell.rank for cell in self.own}):
            own = [cell for cell in self.own if cell.rank == rank]
            yield from ((1, cell) for cell in own if not rounds_of(record, cell))
            disturbed = record.disturbed()
            yield from ((1, cell) for cell in own if cell.name in disturbed)


def grid_plan(settings: BreakEven, grid: GridSettings) -> GridPlan:
    """The plan of the device's grid."""
    serving, order = GridEngines(settings.device), list(GridStage)
    cells = [
        ServedTraffic(
            f"{traffic.point}, seed {traffic.seed}",
            seconds=grid.seconds(traffic.point),
            rank=order.index(grid.stage(traffic)),
            traffic=traffic,
            settings=grid,
            serving=serving,
        )
        for traffic in plan_grid(grid)
    ]
    engines = serving.configs(engine_config(settings, grid))
    return GridPlan(
        name="grid",
        facts={},
        engines=engines,
        cells=cells,
        rounds=1,
        part=settings.part,
        serving=serving,
    )


class GridRecord:
    """The grid of a file, which other processes may add to, too.

    `facts` gives those of the engines that are measured here.
    """

    def __init__(self, path: Path, plan: GridPlan, facts: Callable[[Described], GridFacts]) -> None:
        self._path, self._facts_of = path, facts
        self._traffic = {c.name: c.traffic for c in plan.cells if isinstance(c, ServedTraffic)}
        self._facts: GridFacts | None = None
        self._grid = read_grid(path) if path.exists() else None
        self.start: float | None = None
        self.seconds: dict[str, list[float]] = {}
        self._count()

    def begin(self, engines: Engines, described: Described, seconds: float) -> None:
        """Raise IncomparableRuns if the file has cells of other hardware, versions or models."""
        self.start, self._facts = seconds, self._facts_of(described)
        self._add(())

    def note(
        self, cell: Cell, number: int, figures: Mapping[str, Mapping[str, ArmCell]], seconds: float
    ) -> None:
        """Add the cells of a traffic to the file."""
        traffic = self._traffic[cell.name]
        cells = []
        for point in traffic.points:
            arms = {arm: found[point.cache] for arm, found in figures.items()}
            cells.append(MeasuredCell(point, traffic.seed, arms, seconds / len(traffic.points)))
        self._add(cells)

    def fail(self, cell: Cell, error: PicBenchError) -> None:
        """Raise the error."""
        raise error

    def disturbed(self) -> set[str]:
        """The cells that something else disturbed when they were measured."""
        cells = self._grid.cells if self._grid else ()
        found = {(cell.point, cell.seed) for cell in cells if cell.disturbed}
        return {name for name, traffic in self._traffic.items() if traffic.keys & found}

    def _add(self, cells: Sequence[MeasuredCell]) -> None:
        assert self._facts is not None
        self._grid = add_cells(self._path, self._facts, cells)
        self._count()

    def _count(self) -> None:
        took = {(c.point, c.seed): c.seconds for c in self._grid.cells} if self._grid else {}
        self.seconds = {
            name: [sum(took.get(key, 0.0) for key in traffic.keys)]
            for name, traffic in self._traffic.items()
            if (traffic.point, traffic.seed) in took
        }


def add_cells(path: Path, facts: GridFacts, cells: Sequence[MeasuredCell]) -> MeasuredGrid:
    """Add cells to a file that other processes may add to, too; the grid that it has then.

    Where the file has a cell already, the one that was disturbed less is kept. Raises
    IncomparableRuns if the file has cells of other hardware, versions or models.
    """
    with locked(path):
        grid = read_grid(path) if path.exists() else None
        if grid is None or not grid.cells:
            grid = MeasuredGrid(facts, [])
        if not grid.facts.same_graphs(facts):
            raise IncomparableRuns(
                f"{path}: was measured with {grid.facts.graphs()}, here are {facts.graphs()}",
                hint="name another `output`",
            )
        refuse_other_engines(path, grid.facts, facts, _MAY_DIFFER)
        kept = {(cell.point, cell.seed): cell for cell in grid.cells}
        new = {
            (cell.point, cell.seed): cell
            for cell in cells
            if _is_better(cell, kept.get((cell.point, cell.seed)))
        }
        joined = _with_commit(grid.facts, facts.versions["commit"]) if new else grid.facts
        grid = MeasuredGrid(joined, list((kept | new).values()))
        write_grid(path, grid)
    return grid


def _is_better(cell: MeasuredCell, known: MeasuredCell | None) -> bool:
    return known is None or cell.quiet > known.quiet


def _with_commit(facts: GridFacts, commit: str) -> GridFacts:
    """Facts of a grid that has cells of `commit`, too."""
    commits = [*facts.versions["commit"].split(", "), commit]
    joined = ", ".join(dict.fromkeys(commits))
    return replace(facts, versions={**facts.versions, "commit": joined})


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
    """mepic's figure over a rival's at a point, one ratio for each seed."""

    point: GridPoint
    quantity: Quantity
    rival: str
    ratios: tuple[float, ...]

    @property
    def middle(self) -> float:
        """The median over the seeds; below 1 mepic is better."""
        return median(self.ratios)

    @property
    def sure(self) -> bool:
        """Whether all seeds are on the same side of 1."""
        return max(self.ratios) < 1 or min(self.ratios) > 1


def find_ratios(grid: MeasuredGrid) -> list[SeedRatios]:
    """All ratios of a grid: quantity by quantity, rival by rival, point by point."""
    points = grid.points()
    return [
        SeedRatios(point, quantity, rival, tuple(_ratio(c.arms, quantity, rival) for c in cells))
        for quantity, rival in product(QUANTITIES, RIVALS)
        for point, cells in points.items()
        if quantity.loads(point.load)
    ]


def _ratio(arms: Mapping[str, ArmCell], quantity: Quantity, rival: str) -> float:
    other = arms[rival] if rival in arms else arms[_SAME[rival]]
    return quantity.value(arms[SUBJECT]) / quantity.value(other)


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


#: A traffic at any reuse, and a figure against a rival.
_Comparison = tuple[GridPoint, str, str]


def _crossings(ratios: Sequence[SeedRatios]) -> dict[_Comparison, float | None]:
    """The crossings of traffic of which several reuses were measured."""
    found: dict[_Comparison, dict[float, float]] = {}
    for one in ratios:
        key = replace(one.point, reuse=0.0), one.quantity.name, one.rival
        found.setdefault(key, {})[one.point.reuse] = one.middle
    return {key: crossing(column) for key, column in found.items() if len(column) > 1}


def write_page(grid: MeasuredGrid, output: Path, notes: Sequence[str] = ()) -> str:
    """Write ``README.md`` and a figure for each quantity; the page. `notes` end it."""
    ratios = find_ratios(grid)
    figures = "\n".join(_draw(grid, ratios, output))
    text = render_page(grid, ratios, figures, notes)
    write_whole(output / "README.md", text.encode())
    return text


def _draw(grid: MeasuredGrid, ratios: Sequence[SeedRatios], output: Path) -> Iterator[str]:
    """Draw a figure for each quantity and cache that was measured; a link to each."""
    for quantity, cache in product(QUANTITIES, ("cold", "warm")):
        shown = [_shown(ratios, quantity.name, rival, cache) for rival in RIVALS]
        if not all(shown):
            continue
        panels = [
            RatioPanel(
                f"against {rival}",
                {(r.point.reuse, (r.point.chunks, r.point.chunk_tokens)): r.middle for r in own},
            )
            for rival, own in zip(RIVALS, shown, strict=True)
        ]
        name = f"{quantity.name}-{cache}"
        draw_ratios(panels, _caption(grid, shown[0]), output / name)
        yield f"![{SUBJECT}'s {quantity.text} over another arm's, {cache} cache]({name}.svg)"


def _shown(ratios: Sequence[SeedRatios], quantity: str, rival: str, cache: str) -> list[SeedRatios]:
    """The ratios at the corpus, the load and the reply that most points have."""
    own = [
        (r, (r.point.load, r.point.corpus, r.point.output))
        for r in ratios
        if (r.quantity.name, r.rival, r.point.cache) == (quantity, rival, cache)
    ]
    counts = Counter(load for _, load in own)
    return [r for r, load in own if load == counts.most_common(1)[0][0]]


def _caption(grid: MeasuredGrid, shown: Sequence[SeedRatios]) -> str:
    """What one panel shows, and where it was measured."""
    point, seeds = shown[0].point, sorted({len(found.ratios) for found in shown})
    counts = " to ".join(str(count) for count in dict.fromkeys((seeds[0], seeds[-1])))
    return (
        f"{SUBJECT}'s {shown[0].quantity.text} over another arm's; below 1, in blue and within the "
        f"line, {SUBJECT} is better. Load: {_load(point)}, {point.cache} cache, corpus of "
        f"{point.corpus} chunks, replies of {point.output} tokens; median, n={counts}. "
        + _COMMIT.sub(r"\1", grid.about())
    )


def render_page(
    grid: MeasuredGrid, ratios: Sequence[SeedRatios], figures: str, notes: Sequence[str]
) -> str:
    """The page, in Markdown; `figures` are links."""
    return page(
        "Break-even: where position-independent caching pays",
        grid.about(),
        f"{len(grid.points())} cells, {len(grid.cells)} with repeats: {_seeds(grid)}. Engines: "
        f"{grid.facts.graphs()}. Prompts are chunks of "
        "random tokens between short texts: times and memory, not answers. Reuse is the share "
        "of chunk tokens in chunks of the corpus, all others occur once; a cold cache is empty "
        "before the first request, a warm one has served all chunks of the corpus that are "
        "needed (of a corpus larger than the pool, as many as fit), each as the first of a "
        "prompt, and as many requests of the same kind. "
        f"`alone` is one request at a time, `burst` {grid.facts.running} at a time. Ratios are "
        f"{SUBJECT}'s figure over the other arm's in the same cell, seed by seed."
        f"{_unserved(grid)}{_quiet(grid)}",
        "## From which reuse on",
        f"The least reuse at which `{SUBJECT}` is better, between the points by a straight "
        "line. `never` is: not at the most reuse either.",
        _crossing_table(ratios),
        figures,
        f"## Where `{SUBJECT}` loses",
        _losses(ratios),
        *notes,
    )


def _seeds(grid: MeasuredGrid) -> str:
    """How many cells have how many seeds."""
    counts = Counter(len(cells) for cells in grid.points().values())
    return ", ".join(
        f"{cells if len(counts) > 1 else 'all'} with {seeds} seed{'s' * (seeds > 1)}"
        for seeds, cells in sorted(counts.items())
    )


def _unserved(grid: MeasuredGrid) -> str:
    """What stands for rivals that some cells do not have."""
    if all(rival in cell.arms for rival in RIVALS for cell in grid.cells):
        return ""
    return " Where no chunk recurs `reorder` sends what `prefix` does, and has its figures."


def _quiet(grid: MeasuredGrid) -> str:
    """How many of the requests alone began on a quiet core, where cells say."""
    alone = [arm for cell in grid.cells if cell.point.load == ALONE for arm in cell.arms.values()]
    known = [arm.quiet for arm in alone if arm.quiet is not None]
    if not known:
        return ""
    older = f"; of {len(alone) - len(known)} figures it is not known" * (len(alone) > len(known))
    return (
        f" {fmean(known):.0%} of the requests alone began on a core that nothing else used{older}."
    )


_TRAFFIC = ("chunks", "tokens a chunk", "prompt", "corpus", "reply", "load", "cache")


def _traffic(point: GridPoint) -> tuple[str, ...]:
    """A point in the columns `_TRAFFIC`."""
    prompt = point.chunks * point.chunk_tokens
    sizes = f"{point.chunks}", f"{point.chunk_tokens}", f"{prompt:,}", f"{point.corpus:,}"
    return *sizes, f"{point.output}", _load(point), point.cache


def _load(point: GridPoint) -> str:
    return point.load if point.load[0].isalpha() else f"{point.load} a second"


def _losses(ratios: Sequence[SeedRatios]) -> str:
    lost = sorted((r for r in ratios if r.middle > 1), key=lambda r: -r.middle)
    if not lost:
        return "In no cell that was measured."
    rows = [
        (
            found.quantity.text,
            found.rival,
            f"{found.point.reuse:.0%}",
            *_traffic(found.point),
            f"{found.middle:.2f} ({min(found.ratios):.2f} - {max(found.ratios):.2f}, "
            f"n={len(found.ratios)})",
            "yes" if found.sure else "no",
        )
        for found in lost
    ]
    head = ("figure", "against", "reuse", *_TRAFFIC, "ratio, median (range)", "all seeds agree")
    share = f"{len(lost)} of {len(ratios)} comparisons, the largest loss first."
    return paragraphs(share, table(head, rows, right=2))


def _crossing_table(ratios: Sequence[SeedRatios]) -> str:
    """A row for each traffic of which several reuses were measured."""
    columns = [(quantity, rival) for quantity in QUANTITIES for rival in RIVALS]
    found = _crossings(ratios)
    rows = [
        (*_traffic(point), *(_crossing(found, (point, q.name, rival)) for q, rival in columns))
        for point in dict.fromkeys(point for point, _, _ in found)
    ]
    return table((*_TRAFFIC, *(f"{q.text}, {rival}" for q, rival in columns)), rows, right=0)


def _crossing(found: Mapping[_Comparison, float | None], key: _Comparison) -> str:
    reuse = found.get(key, NOTHING)
    return reuse if isinstance(reuse, str) else "never" if reuse is None else f"{reuse:.0%}"


_STAGE_HEAD = (
    "measured until",
    "cells",
    "seconds",
    "TTFT of requests alone",
    "requests a second",
    f"least reuse at which {SUBJECT} is better",
)


def interpolation(grid: MeasuredGrid, settings: GridSettings) -> tuple[str, ...]:
    """How well a grid predicts itself, and grids that end after a stage predict themselves."""
    errors = GridPredictor(grid).errors()
    return (
        "## How well it interpolates",
        "Error of what `picbench profile` predicts for each traffic from all others: TTFT of "
        f"requests alone: {errors.ttft or 'too few points'}; requests a second in bursts: "
        f"{errors.requests_s or 'too few points'}.",
        "The same of grids that end after a stage, and their crossings beside the whole one's:",
        stage_errors(grid, settings),
    )


def stage_errors(grid: MeasuredGrid, settings: GridSettings) -> str:
    """A table with a row for each stage that has cells; its seconds are without engines' start."""
    order = list(GridStage)
    planned = [order.index(settings.stage(t)) for t in plan_grid(settings) for _ in t.points]
    places = [
        order.index(settings.stage(GridTraffic(replace(cell.point, cache="cold"), cell.seed)))
        for cell in grid.cells
    ]
    whole, rows = _crossings(find_ratios(grid)), []
    for place in sorted(set(places)):
        cells = [cell for cell, own in zip(grid.cells, places, strict=True) if own <= place]
        part = MeasuredGrid(grid.facts, cells)
        errors = GridPredictor(part).errors()
        rows.append(
            (
                f"{order[place]}",
                f"{len(cells)} of {sum(own <= place for own in planned)}",
                f"{sum(cell.seconds for cell in cells):,.0f}",
                f"{errors.ttft or 'too few points'}",
                f"{errors.requests_s or 'too few points'}",
                _apart(_crossings(find_ratios(part)), whole),
            )
        )
    return table(_STAGE_HEAD, rows)


def _apart(
    found: Mapping[_Comparison, float | None], whole: Mapping[_Comparison, float | None]
) -> str:
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
