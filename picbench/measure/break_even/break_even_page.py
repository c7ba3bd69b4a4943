"""The page of a measured grid: where mepic pays, where it loses, and figures of both."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from picbench.grid.measured_grid import GridPoint, MeasuredGrid
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

_HEAD = ("chunks", "tokens a chunk", "prompt", "corpus", "reply", "load", "cache")


def write_page(grid: MeasuredGrid, output: Path, notes: Sequence[str] = ()) -> str:
    """Write ``README.md`` and a figure for each quantity; the page. `notes` end it."""
    ratios = find_ratios(grid)
    page = render_page(grid, ratios, notes)
    (output / "README.md").write_text(page, encoding="utf-8")
    for quantity in QUANTITIES:
        for cache in ("cold", "warm"):
            panels = [_panel(ratios, quantity.name, rival, cache) for rival in RIVALS]
            caption = f"{SUBJECT}'s {quantity.text} over that of another arm, {cache} cache; below "
            caption += f"1 {SUBJECT} is better. {grid.about()}"
            if all(panel.values for panel in panels):
                draw_ratios(panels, caption, output / f"{quantity.name}-{cache}")
    return page


def render_page(grid: MeasuredGrid, ratios: Sequence[SeedRatios], notes: Sequence[str]) -> str:
    """The page, in Markdown."""
    return "\n\n".join(
        [
            "# Break-even: where position-independent caching pays",
            grid.about(),
            f"{len(grid.points())} cells, {len(grid.cells)} with repeats. Prompts are chunks of "
            "random tokens between short texts: times and memory, not answers. Reuse is the share "
            "of chunk tokens in chunks of the corpus, all others occur once; a cold cache is empty "
            "before the first request, a warm one has served as many requests of the same kind. "
            f"`alone` is one request at a time, `burst` {grid.facts.running} at a time. Ratios are "
            f"{SUBJECT}'s figure over the other arm's in the same cell, seed by seed.",
            "## From which reuse on",
            f"The least reuse at which `{SUBJECT}` is better, between the points by a straight "
            "line. `never` is: not at the most reuse either.",
            markdown.table(
                (*_HEAD, *(f"{q.text}, {rival}" for q in QUANTITIES for rival in RIVALS)),
                _crossings(ratios),
                right=0,
            ),
            f"## Where `{SUBJECT}` loses",
            _losses(ratios),
            *notes,
            "",
        ]
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


def _cells(point: GridPoint) -> tuple[str, ...]:
    load = point.load if point.load[0].isalpha() else f"{point.load} a second"
    return (
        f"{point.chunks}",
        f"{point.chunk_tokens}",
        f"{point.chunks * point.chunk_tokens:,}",
        f"{point.corpus:,}",
        f"{point.output}",
        load,
        point.cache,
    )


def _panel(ratios: Sequence[SeedRatios], quantity: str, rival: str, cache: str) -> RatioPanel:
    """The ratios at the corpus, the load and the reply that most points have."""
    own = [
        r
        for r in ratios
        if r.quantity.name == quantity and r.rival == rival and r.point.cache == cache
    ]
    loads = [(r.point.load, r.point.corpus, r.point.output) for r in own]
    most = max(loads, key=loads.count, default=None)
    values = {
        (r.point.reuse, (r.point.chunks, r.point.chunk_tokens)): r.middle
        for r in own
        if (r.point.load, r.point.corpus, r.point.output) == most
    }
    return RatioPanel(f"against {rival}", values)
