"""Scores by where in the prompt the answer lies: tables, figures, from scores row by row."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from picbench.errors import DataError
from picbench.measure.algorithms.scored_part import Case, ScoredPart, read_parts
from picbench.measure.depth.depth_cuts import (
    CUTS,
    DepthBin,
    DepthCut,
    ScoredRow,
    bins_of,
    heat_map,
)
from picbench.measure.depth.row_place import NEEDLE, bundled_places, check_same
from picbench.measure.report import save
from picbench.output import markdown
from picbench.output.figures.depth_figure import draw_heat_maps
from picbench.output.figures.paper_canvas import Panel
from picbench.output.figures.paper_panels import Spot, draw_lines

MODEL = "testbed"

#: Arms of tables, and what figures call those that they show.
ARMS = (
    "full",
    "naive",
    "epic:k=16",
    "epic:k=64",
    "cacheblend:r=0.15",
    "mepic",
    "mepic:context=document",
    "mepic:anchored=on:context=document",
)
DRAWN: Mapping[str, str] = {
    "full": "full",
    "naive": "naive",
    "epic:k=16": "epic:k=16",
    "mepic": "mepic",
    "mepic:anchored=on:context=document": "mepic, ours",
}

#: Depths and lengths of the bundled needles.
_GRID = (5, 8)


def write(folder: Path, output: Path) -> str:
    """Write ``depth.md``, ``depth.json`` and figures from the scores in `folder`; the page.

    Raises DataError for scores of other rows than those that are bundled, or without these arms.
    """
    parts = {part.case: part for part in read_parts(folder)}
    wanted = dict.fromkeys(dataset for cut in CUTS for dataset in cut.datasets)
    found = {d: parts[case] for d in wanted if (case := Case(MODEL, d)) in parts}
    rows = {dataset: _scored(part) for dataset, part in found.items()}
    cuts = {
        cut: bins_of(cut, [row for d in cut.datasets for row in rows[d]], ARMS)
        for cut in CUTS
        if all(dataset in rows for dataset in cut.datasets)
    }
    note = _note(list(found.values()))
    for cut, bins in cuts.items():
        if cut.drawn:
            _draw(cut, bins, note, output)
    maps = {arm: heat_map(rows[NEEDLE], arm, _GRID) for arm in DRAWN} if NEEDLE in rows else {}
    if maps:
        _draw_maps(maps, rows[NEEDLE], note, output)
    page = "\n".join(_page(cuts, note, needles=bool(maps)))
    save(output / "depth", _document(cuts, maps, list(found.values())), page)
    return page


def _scored(part: ScoredPart) -> list[ScoredRow]:
    missing = [arm for arm in ARMS if arm not in part.arms]
    if missing:
        raise DataError(f"{part.case.name}: no scores of {missing[0]}", hint="measure it, too")
    places = bundled_places(part.case.dataset, MODEL, part.rows)
    check_same(places, part.prompt, part.case.name)
    return [
        (place, {arm: part.arms[arm].score[row] for arm in ARMS})
        for row, place in enumerate(places)
    ]


def _note(parts: Sequence[ScoredPart]) -> str:
    places: dict[str, dict[str, None]] = {}
    for facts in (part.facts for part in parts):
        place = f"{facts['gpu']}, {facts['dtype']}"
        places.setdefault(place, {})[facts["commit"][:7]] = None
    where = (f"{place}, commit {', '.join(commits)}" for place, commits in places.items())
    return f"Testbed weights, synthetic rows; {'; '.join(where)}."


def _document(
    cuts: Mapping[DepthCut, Sequence[DepthBin]],
    maps: Mapping[str, Sequence[Sequence[float]]],
    parts: Sequence[ScoredPart],
) -> dict[str, object]:
    return {
        "schema": 1,
        "provenance": {part.case.name: dict(part.facts) for part in parts},
        "cuts": {
            cut.name: {
                "quantity": cut.quantity,
                "datasets": list(cut.datasets),
                "bins": [asdict(found) for found in bins],
            }
            for cut, bins in cuts.items()
        },
        "needle": {"rows": "depth", "columns": "length", "score": dict(maps)},
    }


def _draw(cut: DepthCut, bins: Sequence[DepthBin], note: str, output: Path) -> None:
    lines = {
        name: [
            Spot(place, s.value, s.low, s.high)
            for place, found in enumerate(bins)
            if (s := found.scores[arm])
        ]
        for arm, name in DRAWN.items()
    }
    ticks = {float(place): f"{found.label}\nn={found.rows}" for place, found in enumerate(bins)}
    sets = ", ".join(f"{dataset}-like" for dataset in cut.datasets)
    text = f"{sets}. {note} Bars: 95 %. Ours: {_ours()}."
    draw_lines(Panel(cut.quantity, "mean score", text), lines, ticks, output / f"depth-{cut.name}")


def _ours() -> str:
    return next(arm for arm, name in DRAWN.items() if name.endswith("ours"))


def _draw_maps(
    maps: Mapping[str, Sequence[Sequence[float]]],
    rows: Sequence[ScoredRow],
    note: str,
    output: Path,
) -> None:
    depths, lengths = _GRID
    sizes = sorted(place.length or 0 for place, _ in rows)
    middles = [sizes[(2 * n + 1) * len(sizes) // (2 * lengths)] for n in range(lengths)]
    columns = [f"{size / 1000:.1f}k" for size in middles]
    lines = [f"{100 * n // (depths - 1)} %" for n in range(depths)]
    each = len(rows) // (depths * lengths)
    text = f"needle-like, {each} rows a cell. {note} Ours: {_ours()}."
    panel = Panel("tokens of context", "depth of the needle", text)
    named = {DRAWN[arm]: cells for arm, cells in maps.items()}
    draw_heat_maps(panel, named, (columns, lines), output / "depth-needle")


def _page(
    cuts: Mapping[DepthCut, Sequence[DepthBin]], note: str, *, needles: bool
) -> Iterator[str]:
    yield "# Where in the prompt the answer lies"
    yield ""
    yield (
        f"{note} Scores are those of [algorithms.md](algorithms.md), row by row; where the answer "
        "lies is read from the bundled rows. Mean scores with 95 % bootstrap intervals over rows; "
        "an interval of no width says that all rows of a bin score the same."
    )
    yield ""
    if needles:
        yield "## Needle: length of the context, and depth"
        yield ""
        yield "![scores by length and depth](depth-needle.png)"
        yield ""
    for cut, bins in cuts.items():
        yield f"## {cut.title}"
        yield ""
        if cut.drawn:
            yield f"![scores by {cut.quantity}](depth-{cut.name}.png)"
            yield ""
        yield f"Rows by {cut.quantity}, of {', '.join(cut.datasets)}:"
        yield ""
        head = ("rows", "n", *(f"`{arm}`" for arm in ARMS))
        lines = [
            (found.label, str(found.rows), *(str(found.scores[arm]) for arm in ARMS))
            for found in bins
        ]
        yield markdown.table(head, lines)
        yield ""
    yield "Made by `picbench measure algorithms depth`, which needs no engine."
    yield ""
