"""Ratios of mepic to arms without chunks, cell by cell and seed by seed."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from statistics import fmean, median

import numpy as np

from picbench.experiments.grid_plan import GridSettings, GridStage, GridTraffic, plan_grid
from picbench.figures.frontier import RatioPanel, draw_ratios
from picbench.files import write_whole
from picbench.profile.grid import ALONE, BURST, ArmCell, GridPoint, MeasuredGrid
from picbench.profile.predictor import GridPredictor
from picbench.tables import table as markdown

#: The arm that is judged, and those that it is held against.
SUBJECT, RIVALS = "mepic", ("prefix", "reorder")

#: Whose cell is a rival's where it has none: it would have sent the same there.
_SAME = {"reorder": "prefix"}


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
    return list(_ratios(grid))


def _ratios(grid: MeasuredGrid) -> Iterator[SeedRatios]:
    points = grid.points()
    for quantity in QUANTITIES:
        for rival in RIVALS:
            for point, cells in points.items():
                if quantity.loads(point.load):
                    found = tuple(_ratio(cell.arms, quantity, rival) for cell in cells)
                    yield SeedRatios(point, quantity, rival, found)


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


_HEAD = ("chunks", "tokens a chunk", "prompt", "corpus", "reply", "load", "cache")

#: A commit's whole id: its first letters say enough in a caption.
_COMMIT = re.compile(r"\b([0-9a-f]{7})[0-9a-f]{33}\b")


def write_page(grid: MeasuredGrid, output: Path, notes: Sequence[str] = ()) -> str:
    """Write ``README.md`` and a figure for each quantity; the page. `notes` end it."""
    ratios = find_ratios(grid)
    figures = list(_draw(grid, ratios, output))
    page = render_page(grid, ratios, figures, notes)
    write_whole(output / "README.md", page.encode())
    return page


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


def _caption(grid: MeasuredGrid, shown: Sequence[SeedRatios]) -> str:
    """What one panel shows, and where it was measured."""
    first = shown[0]
    seeds = sorted({len(found.ratios) for found in shown})
    counts = " to ".join(str(count) for count in dict.fromkeys((seeds[0], seeds[-1])))
    point = first.point
    return (
        f"{SUBJECT}'s {first.quantity.text} over another arm's; below 1, in blue and within the "
        f"line, {SUBJECT} is better. Load: {_load(point)}, {point.cache} cache, corpus of "
        f"{point.corpus} chunks, replies of {point.output} tokens; median, n={counts}. "
        + _COMMIT.sub(r"\1", grid.about())
    )


def render_page(
    grid: MeasuredGrid, ratios: Sequence[SeedRatios], figures: Sequence[str], notes: Sequence[str]
) -> str:
    """The page, in Markdown; `figures` are links."""
    return "\n\n".join(
        [
            "# Break-even: where position-independent caching pays",
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
            markdown.table(
                (*_HEAD, *(f"{q.text}, {rival}" for q in QUANTITIES for rival in RIVALS)),
                _crossings(ratios),
                right=0,
            ),
            *(["\n".join(figures)] if figures else []),
            f"## Where `{SUBJECT}` loses",
            _losses(ratios),
            *notes,
            "",
        ]
    )


def _seeds(grid: MeasuredGrid) -> str:
    """How many cells have how many seeds."""
    counts = Counter(len(cells) for cells in grid.points().values())
    some = len(counts) > 1
    return ", ".join(
        f"{cells if some else 'all'} with {seeds} seed{'s' * (seeds > 1)}"
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


def _losses(ratios: Sequence[SeedRatios]) -> str:
    lost = sorted((r for r in ratios if r.middle > 1), key=lambda r: -r.middle)
    if not lost:
        return "In no cell that was measured."
    rows = [
        (
            found.quantity.text,
            found.rival,
            f"{found.point.reuse:.0%}",
            *_cells(found.point),
            f"{found.middle:.2f} ({min(found.ratios):.2f} - {max(found.ratios):.2f}, "
            f"n={len(found.ratios)})",
            "yes" if found.sure else "no",
        )
        for found in lost
    ]
    head = ("figure", "against", "reuse", *_HEAD, "ratio, median (range)", "all seeds agree")
    share = f"{len(lost)} of {len(ratios)} comparisons, the largest loss first."
    return f"{share}\n\n{markdown.table(head, rows, right=2)}"


def _crossings(ratios: Sequence[SeedRatios]) -> Iterator[Sequence[str]]:
    """A row for each traffic of which several reuses were measured."""
    kinds: dict[tuple[str, ...], dict[tuple[str, str], dict[float, float]]] = {}
    for found in ratios:
        kind = kinds.setdefault(_cells(found.point), {})
        column = kind.setdefault((found.quantity.name, found.rival), {})
        column[found.point.reuse] = found.middle
    for cells, columns in kinds.items():
        if max(len(column) for column in columns.values()) < 2:
            continue
        each = (columns.get((q.name, rival)) for q in QUANTITIES for rival in RIVALS)
        yield (*cells, *(_crossing(column) if column else "-" for column in each))


def _crossing(column: dict[float, float]) -> str:
    found = crossing(column)
    return "never" if found is None else f"{found:.0%}"


def _load(point: GridPoint) -> str:
    return point.load if point.load[0].isalpha() else f"{point.load} a second"


def _cells(point: GridPoint) -> tuple[str, ...]:
    return (
        f"{point.chunks}",
        f"{point.chunk_tokens}",
        f"{point.chunks * point.chunk_tokens:,}",
        f"{point.corpus:,}",
        f"{point.output}",
        _load(point),
        point.cache,
    )


def _shown(ratios: Sequence[SeedRatios], quantity: str, rival: str, cache: str) -> list[SeedRatios]:
    """The ratios at the corpus, the load and the reply that most points have."""
    own = [
        r
        for r in ratios
        if r.quantity.name == quantity and r.rival == rival and r.point.cache == cache
    ]
    loads = [(r.point.load, r.point.corpus, r.point.output) for r in own]
    most = max(loads, key=loads.count, default=None)
    return [r for r in own if (r.point.load, r.point.corpus, r.point.output) == most]


_STAGE_ERRORS_HEAD = (
    "measured until",
    "cells",
    "seconds",
    "TTFT of requests alone",
    "requests a second",
    "least reuse at which mepic is better",
)

#: From which reuse on mepic is better: by traffic, figure and rival, None for never.
_Crossings = Mapping[tuple[GridPoint, str, str], float | None]


@dataclass(frozen=True)
class _Part:
    """The cells of a grid until the end of a stage, and how many are planned until then."""

    stage: GridStage
    grid: MeasuredGrid
    planned: int

    @cached_property
    def crossings(self) -> _Crossings:
        """Of traffic of which several reuses were measured."""
        found: dict[tuple[GridPoint, str, str], dict[float, float]] = {}
        for one in find_ratios(self.grid):
            key = replace(one.point, reuse=0.0), one.quantity.name, one.rival
            found.setdefault(key, {})[one.point.reuse] = one.middle
        return {key: crossing(column) for key, column in found.items() if len(column) > 1}


def stage_errors(grid: MeasuredGrid, settings: GridSettings) -> str:
    """A table with a row for each stage that has cells; its seconds are without engines' start."""
    parts = list(_parts(grid, settings))
    return markdown.table(_STAGE_ERRORS_HEAD, [_row(part, parts[-1].crossings) for part in parts])


def _parts(grid: MeasuredGrid, settings: GridSettings) -> Iterator[_Part]:
    order = list(GridStage)
    planned = [order.index(settings.stage(t)) for t in plan_grid(settings) for _ in t.points]
    places = [
        order.index(settings.stage(GridTraffic(replace(cell.point, cache="cold"), cell.seed)))
        for cell in grid.cells
    ]
    for place in sorted(set(places)):
        cells = [cell for cell, own in zip(grid.cells, places, strict=True) if own <= place]
        count = sum(own <= place for own in planned)
        yield _Part(order[place], MeasuredGrid(grid.facts, cells), count)


def _row(part: _Part, whole: _Crossings) -> tuple[str, ...]:
    errors = GridPredictor(part.grid).errors()
    return (
        f"{part.stage}",
        f"{len(part.grid.cells)} of {part.planned}",
        f"{sum(cell.seconds for cell in part.grid.cells):,.0f}",
        f"{errors.ttft or 'too few points'}",
        f"{errors.requests_s or 'too few points'}",
        _apart(part.crossings, whole),
    )


def _apart(found: _Crossings, whole: _Crossings) -> str:
    """How far crossings are from those of the whole grid."""
    both = [
        abs(one - other)
        for key, other in whole.items()
        if (one := found.get(key)) is not None and other is not None
    ]
    shared = [key for key in found if key in whole]
    one_sided = sum((found[key] is None) is not (whole[key] is None) for key in shared)
    if not both:
        return "none"
    points = 100 * np.quantile(both, 0.9)
    return (
        f"{len(shared)} of {len(whole)}; 90 % within {points:.0f} points of the whole grid's, "
        f"{one_sided} only in one"
    )
