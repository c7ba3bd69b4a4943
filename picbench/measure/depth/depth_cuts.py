"""Rows by what is known of their places: mean scores with intervals, the arms paired by row."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from picbench.measure.algorithms.row_intervals import RowInterval, difference_of
from picbench.measure.depth.row_place import NEEDLE, QUESTIONS, RowPlace

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
    depths, lengths = size
    cells: list[list[list[float]]] = [[[] for _ in range(lengths)] for _ in range(depths)]
    deep = _ranks([place.depth or 0.0 for place, _ in rows], depths)
    long = _ranks([float(place.length or 0) for place, _ in rows], lengths)
    for (_, scores), depth, length in zip(rows, deep, long, strict=True):
        cells[depth][length].append(scores[arm])
    return [[fmean(cell) if cell else float("nan") for cell in line] for line in cells]


def _ranks(values: Sequence[float], parts: int) -> list[int]:
    """The part, of this many of equal size, that each value is in when all are sorted."""
    order = sorted(range(len(values)), key=lambda n: values[n])
    found = [0] * len(values)
    for rank, number in enumerate(order):
        found[number] = rank * parts // len(values)
    return found
