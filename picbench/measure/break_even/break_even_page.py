"""The page of a measured grid: where mepic pays, where it loses, and figures of both."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean

from picbench.grid.measured_grid import ALONE, GridPoint, MeasuredGrid
from picbench.measure.break_even.break_even_ratios import (
    QUANTITIES,
    RIVALS,
    SUBJECT,
    SeedRatios,
    crossing,
    find_ratios,
)
from picbench.output import markdown
from picbench.output.figures.break_even_figure import RatioPanel, draw_ratios
from picbench.profile.prediction.graph_sizes import graph_sizes
from picbench.whole_files import write_whole

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
        yield f"![{SUBJECT}'s {quantity.text} over another arm's, {cache} cache]({name}.png)"


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
            f"{graph_sizes(grid.facts)}. Prompts are chunks of "
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
