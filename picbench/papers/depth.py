"""Scores by where in the prompt the answer lies: read back from the texts of generated rows."""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean

import pandas as pd

from picbench.errors import DataError
from picbench.figures.canvas import Panel
from picbench.figures.frontier import draw_heat_maps
from picbench.figures.panels import Spot, draw_lines
from picbench.papers.arm_scores import Case, RowInterval, ScoredPart, difference_of, read_parts
from picbench.papers.serve_arms import load_case
from picbench.run.measurements import DepthPage, Outcome
from picbench.tables.page import page, save
from picbench.tables.table import table
from picbench.workloads import datasets, models
from picbench.workloads.datasets.base import Reading
from picbench.workloads.prompts.drop import leads
from picbench.workloads.prompts.tokens import Tokenizer, encode
from picbench.workloads.sample import Sample
from picbench.workloads.sources.bundled import BUNDLED
from picbench.workloads.sources.row import DatasetRow
from picbench.workloads.sources.source import locate

_SECTION = re.compile(r"^Section \d+: (.+)$", re.MULTILINE)
_SENTENCE = re.compile(r"[^.\n]*\.")


@dataclass(frozen=True, slots=True)
class NeedlePlace:
    """Characters of a row's context: where the remark and its section's heading begin.

    Bundled remarks do not name the person, whom only the heading names.
    """

    remark: int
    heading: int


def find_needle(row: DatasetRow) -> NeedlePlace:
    """The place of the remark that a bundled needle row asks for; DataError if there is not one."""
    sections = list(_sections(row))
    asked = [found for found in sections if found[0] in row.input]
    if not asked:
        raise DataError(f"{row.source}: no section about the person of the question")
    # A name may begin with another one.
    person, start, end = max(asked, key=lambda found: len(found[0]))
    who = re.escape(person)
    asks = re.search(rf"the (.+) of {who}", row.input) or re.search(rf"{who}'s (.+)\?", row.input)
    if asks is None:
        raise DataError(f"{row.input!r} asks nothing about {person}")
    secret = asks[1]
    text = row.context[start:end]
    places = [
        match.start() + start
        for match in _SENTENCE.finditer(text, text.find("\n") + 1)
        if secret in match[0] and row.answers[0] in match[0]
    ]
    if len(places) != 1:
        raise DataError(f"{row.source}: {len(places)} remarks about {secret!r} of {person}, not 1")
    return NeedlePlace(places[0], start)


def _sections(row: DatasetRow) -> Iterator[tuple[str, int, int]]:
    """Person, first and last character of each section."""
    found = list(_SECTION.finditer(row.context))
    ends = [match.start() for match in found[1:]] + [len(row.context)]
    for match, end in zip(found, ends, strict=True):
        yield match[1], match.start(), end


#: What is known of rows, by the data sets whose generated rows say it.
QUESTIONS = ("musique", "2wikimqa", "hotpotqa")
NEEDLE = "needle"


@dataclass(frozen=True, slots=True)
class RowPlace:
    """What is known of a row; None where it does not apply.

    Questions over passages: `hops` are the passages that the answer needs, `leads` those that are
    before one of them in its document without stating a fact of the answer; `chunks_apart` is how
    many chunks after the first one the last one is, `tokens_apart` is what lies between them.
    Needles: `length` of the context in tokens, `depth` of the remark in it from 0 to 1, its
    distance from the start of its chunk in tokens (`into_chunk`), and that from the heading which
    says whom it is about, in chunks (`heading_apart`).
    """

    prompt: int
    hops: int | None = None
    leads: int | None = None
    chunks_apart: int | None = None
    tokens_apart: int | None = None
    length: int | None = None
    depth: float | None = None
    into_chunk: int | None = None
    heading_apart: int | None = None


def bundled_places(dataset: str, model: str, rows: int) -> list[RowPlace]:
    """The places of the first bundled rows of a data set, as `model` tokenizes them.

    Raises DataError for a row whose needle is not found.
    """
    samples = load_case(Case(model, dataset), ("full",), rows).samples
    tokenizer = models.load_tokenizer(models.resolve(model))
    reading = Reading(lambda texts: [len(ids) for ids in encode(tokenizer, list(texts))])
    bundled = datasets.find(dataset).rows(locate(BUNDLED, dataset), reading)
    found = {row.id: row for row in bundled}
    place = _needle if dataset == NEEDLE else _questions
    return [place(found[sample.id], sample, tokenizer) for sample in samples]


def _questions(row: DatasetRow, sample: Sample, _: Tokenizer) -> RowPlace:
    first, last = min(row.gold), max(row.gold)
    if len(sample.chunks) != len(row.documents):
        raise DataError(f"{row.source}: {len(sample.chunks)} chunks, not {len(row.documents)}")
    between = sample.chunks[first + 1 : last]
    return RowPlace(
        sample.prompt_tokens,
        hops=len(row.gold),
        leads=len(leads(row.documents, row.gold)),
        chunks_apart=last - first,
        tokens_apart=sum(len(chunk.tokens) for chunk in between),
    )


def _needle(row: DatasetRow, sample: Sample, tokenizer: Tokenizer) -> RowPlace:
    texts = [chunk.text for chunk in sample.chunks]
    ends = list(accumulate(map(len, texts)))
    if "".join(texts) != row.context:
        raise DataError(f"{row.source}: its chunks are not its context")
    place = find_needle(row)

    def at(character: int) -> tuple[int, int]:
        """Chunk, and tokens before the character in it."""
        chunk = bisect_right(ends, character)
        before = texts[chunk][: character - ends[chunk] + len(texts[chunk])]
        [tokens] = encode(tokenizer, [before])
        return chunk, len(tokens)

    starts = [0, *accumulate(len(chunk.tokens) for chunk in sample.chunks)]
    (chunk, into), (head, _) = at(place.remark), at(place.heading)
    where = starts[chunk] + into
    return RowPlace(
        sample.prompt_tokens,
        length=starts[-1],
        depth=where / starts[-1],
        into_chunk=into,
        heading_apart=chunk - head,
    )


def check_same(places: Sequence[RowPlace], prompts: Sequence[int], name: str) -> None:
    """Raise DataError unless scores were measured on prompts of the same lengths."""
    if [place.prompt for place in places] != list(prompts):
        raise DataError(
            f"{name}: measured on other rows than those that are bundled now",
            hint="measure the scores again",
        )


Key = Callable[[RowPlace], int | None]


@dataclass(frozen=True, slots=True)
class DepthCut:
    """A quantity by which rows are told apart. A bin has the values from its edge to the next.

    `labels` are those of the bins; `drawn` is whether there is a figure of it.
    """

    name: str
    title: str
    quantity: str
    datasets: tuple[str, ...]
    key: Key
    edges: tuple[int, ...]
    labels: tuple[str, ...]
    drawn: bool = True

    def label(self, place: RowPlace) -> str | None:
        """The bin of a row; None where it has no such quantity."""
        value = self.key(place)
        return None if value is None else self.labels[bisect_right(self.edges, value) - 1]


#: What is asked of rows. Blocks have 16 tokens: EPIC's and MEPIC's linked tokens end there.
CUTS = (
    DepthCut(
        "hops",
        "Hops",
        "passages that the answer needs",
        ("musique",),
        lambda place: place.hops,
        (2, 3, 4),
        ("2", "3", "4"),
    ),
    DepthCut(
        "leads",
        "Passages that say whom another one is about",
        "passages that say whom another is about",
        QUESTIONS,
        lambda place: place.leads,
        (0, 1, 2, 3),
        ("0", "1", "2", "3 or 4"),
    ),
    DepthCut(
        "chunks-apart",
        "Distance between needed passages, in chunks",
        "chunks from the first needed passage to the last",
        QUESTIONS,
        lambda place: place.chunks_apart,
        (1, 2, 3, 5, 7, 10),
        ("1", "2", "3-4", "5-6", "7-9", "10-19"),
    ),
    DepthCut(
        "tokens-apart",
        "Distance between needed passages, in tokens",
        "tokens between the first needed passage and the last",
        QUESTIONS,
        lambda place: place.tokens_apart,
        (0, 1, 200, 400, 800, 1200),
        ("none", "1-199", "200-399", "400-799", "800-1199", "1200 on"),
        drawn=False,
    ),
    DepthCut(
        "needle-chunk",
        "Needle: depth inside its chunk",
        "tokens of the chunk before the needle",
        (NEEDLE,),
        lambda place: place.into_chunk,
        (0, 16, 128, 256, 384),
        ("0-15", "16-127", "128-255", "256-383", "384 on"),
    ),
    DepthCut(
        "needle-heading",
        "Needle: distance to the heading that says whom it is about",
        "chunks from the heading to the needle",
        (NEEDLE,),
        lambda place: place.heading_apart,
        (0, 1, 2),
        ("0", "1", "2"),
    ),
)


@dataclass(frozen=True, slots=True)
class DepthBin:
    """Rows of a bin, and the mean score of each arm on them; one row has no interval."""

    label: str
    rows: int
    scores: Mapping[str, RowInterval]


#: A row: its place, and its score by arm.
ScoredRow = tuple[RowPlace, Mapping[str, float]]


def bins_of(cut: DepthCut, rows: Sequence[ScoredRow], arms: Sequence[str]) -> list[DepthBin]:
    """The bins that have rows, in order."""
    found: dict[str, list[Mapping[str, float]]] = {label: [] for label in cut.labels}
    for place, scores in rows:
        if (label := cut.label(place)) is not None:
            found[label].append(scores)
    return [
        DepthBin(label, len(group), {arm: mean_of([row[arm] for row in group]) for arm in arms})
        for label, group in found.items()
        if group
    ]


def mean_of(scores: Sequence[float]) -> RowInterval:
    """A mean score; of one row without an interval, which is from 0 to 1."""
    if len(scores) < 2:
        return RowInterval(scores[0], 0.0, 1.0)
    return difference_of(scores, [0.0] * len(scores))


def heat_map(rows: Sequence[ScoredRow], arm: str, size: tuple[int, int]) -> list[list[float]]:
    """Mean scores by depth of the needle (rows) and length of the context (columns).

    `size` is how many of each; both are cut evenly, by rank, as generated rows lie on a grid.
    """
    axes = {"depth": [p.depth for p, _ in rows], "length": [p.length for p, _ in rows]}
    frame = pd.DataFrame(axes | {"score": [scores[arm] for _, scores in rows]})
    for axis, parts in zip(axes, size, strict=True):
        frame[axis] = (frame[axis].rank(method="first") - 1) * parts // len(rows)
    cells = frame.pivot_table("score", *axes, aggfunc=fmean)
    depths, lengths = map(range, size)
    whole: list[list[float]] = cells.reindex(index=depths, columns=lengths).to_numpy().tolist()
    return whole


MODEL = "testbed"
_OURS = "mepic:anchored=on:context=document"

#: Arms of tables, and what figures call those that they show.
ARMS = (
    "full",
    "naive",
    "epic:k=16",
    "epic:k=64",
    "cacheblend:r=0.15",
    "mepic",
    "mepic:context=document",
    _OURS,
)
DRAWN: Mapping[str, str] = {
    "full": "full",
    "naive": "naive",
    "epic:k=16": "epic:k=16",
    "mepic": "mepic",
    _OURS: "mepic, ours",
}

#: Depths and lengths of the bundled needles.
_GRID = (5, 8)


#: What is found of a cut: its bins.
Cuts = Mapping[DepthCut, Sequence[DepthBin]]


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
    shown = render(cuts, note, needles=bool(maps))
    document = {
        "schema": 1,
        "provenance": {part.case.name: dict(part.facts) for part in found.values()},
        "cuts": {
            cut.name: {
                "quantity": cut.quantity,
                "datasets": list(cut.datasets),
                "bins": [asdict(found) for found in bins],
            }
            for cut, bins in cuts.items()
        },
        "needle": {"rows": "depth", "columns": "length", "score": maps},
    }
    save(output / "depth", document, shown)
    return shown


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


def _draw(cut: DepthCut, bins: Sequence[DepthBin], note: str, output: Path) -> None:
    scores = {name: [found.scores[arm] for found in bins] for arm, name in DRAWN.items()}
    lines = {
        name: [Spot(place, s.value, s.low, s.high) for place, s in enumerate(own)]
        for name, own in scores.items()
    }
    ticks = {float(place): f"{found.label}\nn={found.rows}" for place, found in enumerate(bins)}
    sets = ", ".join(f"{dataset}-like" for dataset in cut.datasets)
    text = f"{sets}. {note} Bars: 95 %. Ours: {_OURS}."
    draw_lines(Panel(cut.quantity, "mean score", text), lines, ticks, output / f"depth-{cut.name}")


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
    text = f"needle-like, {each} rows a cell. {note} Ours: {_OURS}."
    panel = Panel("tokens of context", "depth of the needle", text)
    named = {DRAWN[arm]: cells for arm, cells in maps.items()}
    draw_heat_maps(panel, named, (columns, lines), output / "depth-needle")


_ABOUT = (
    "Scores are those of [algorithms.md](algorithms.md), row by row; where the answer lies is read "
    "from the bundled rows. Mean scores with 95 % bootstrap intervals over rows; an interval of no "
    "width says that all rows of a bin score the same."
)


def render(cuts: Cuts, note: str, *, needles: bool) -> str:
    """The page, in Markdown."""
    texts = [f"{note} {_ABOUT}"]
    if needles:
        texts.append("## Needle: length of the context, and depth")
        texts.append("![scores by length and depth](depth-needle.svg)")
    head = ("rows", "n", *(f"`{arm}`" for arm in ARMS))
    for cut, bins in cuts.items():
        lines = [
            (found.label, str(found.rows), *(str(found.scores[arm]) for arm in ARMS))
            for found in bins
        ]
        texts.append(f"## {cut.title}")
        if cut.drawn:
            texts.append(f"![scores by {cut.quantity}](depth-{cut.name}.svg)")
        texts.append(f"Rows by {cut.quantity}, of {', '.join(cut.datasets)}:")
        texts.append(table(head, lines))
    made = "Made by `picbench measure algorithms depth`, which needs no engine."
    return page("Where in the prompt the answer lies", *texts, made)


def depth_page(settings: DepthPage) -> Outcome:
    """See `DepthPage`."""
    return Outcome(write(settings.parts, settings.output))
