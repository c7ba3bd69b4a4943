"""How often intervals of scores and times hold the truth; `python` of this file prints the tables.

`docs/metrics.md` has them. Scores are drawn as answers have them: mostly right or wrong.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats  # type: ignore[import-untyped]

from picbench.statistics.intervals import BoundedMean, ClusterSums, Interval, quantile
from picbench.statistics.significance import paired_ratio

Floats = npt.NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], Floats]

DOCUMENT = Path(__file__).parents[3] / "docs/metrics.md"
SIZES = (12, 20, 50, 100, 200)

#: Draws of a place in the document, and in the test.
DRAWS, SOME = 4000, 300

#: Word F1 of short answers: that of one word of two, of two of three, and so on.
PARTIAL = (0.25, 2 / 7, 0.4, 0.5, 4 / 7, 2 / 3, 0.8)


def word_f1(none: float, whole: float) -> Draw:
    """`none` and `whole` are the shares of scores of 0 and of 1."""
    shares = [none, whole, *[(1 - none - whole) / len(PARTIAL)] * len(PARTIAL)]
    return lambda rng, size: rng.choice([0.0, 1.0, *PARTIAL], p=shares, size=size)


def sets_of_questions(rng: np.random.Generator, size: int) -> Floats:
    """Sets of 1 to 8 questions, which are as hard as their documents: sums and counts."""
    counts = rng.integers(1, 9, size)
    return np.array([rng.binomial(counts, rng.beta(0.6, 0.3, size)), counts], np.float64)


class Kind(NamedTuple):
    """What is drawn, its truth, and the interval of a draw."""

    draw: Draw
    truth: float
    interval: Callable[[Floats], Interval | None]


def bounded(least: float) -> Callable[[Floats], Interval | None]:
    """Of values from `least` to 1, or of sums and counts."""

    def interval(drawn: Floats) -> Interval | None:
        sums, counts = drawn if drawn.ndim == 2 else (drawn, np.ones(len(drawn)))
        return BoundedMean(ClusterSums(sums, counts), least, 1).interval()

    return interval


def at(q: float) -> Callable[[Floats], Interval | None]:
    return lambda drawn: quantile(drawn.tolist(), q).interval


def times(rng: np.random.Generator, size: int) -> Floats:
    return np.exp(0.3 * rng.normal(size=size))


SCORES = {
    "exact match, 90 % right": Kind(lambda rng, n: 1.0 * (rng.random(n) < 0.9), 0.9, bounded(0)),
    "word F1, 60 % zero": Kind(word_f1(0.6, 0.2), 0.2 + 0.2 * float(np.mean(PARTIAL)), bounded(0)),
    "word F1, 90 % zero": Kind(
        word_f1(0.9, 0.04), 0.04 + 0.06 * float(np.mean(PARTIAL)), bounded(0)
    ),
    "Rouge-L, mean 0.25": Kind(lambda rng, n: rng.beta(2, 6, n), 0.25, bounded(0)),
    "change, 5 % lost": Kind(lambda rng, n: -1.0 * (rng.random(n) < 0.05), -0.05, bounded(-1)),
    "sets of 1 to 8 questions": Kind(sets_of_questions, 2 / 3, bounded(0)),
}
TIMES = {
    "ratio of TTFT": Kind(times, 1.0, lambda t: paired_ratio([1.0] * len(t), t.tolist()).interval),
    "TTFT p50": Kind(times, 1.0, at(0.5)),
    "TTFT p90": Kind(times, float(np.exp(0.3 * stats.norm.ppf(0.9))), at(0.9)),
}
KINDS = SCORES | TIMES


@cache
def simulate(kind: str, size: int, draws: int) -> tuple[float, float] | None:
    """The share of intervals that hold the truth, and their mean width; None where there is none.

    Draws that recur are free.
    """
    draw, truth, interval = KINDS[kind]
    rng, hits, width = np.random.default_rng(size), 0, 0.0
    found = dict[bytes, tuple[bool, float] | None]()
    for _ in range(draws):
        drawn = draw(rng, size)
        drawn = drawn if drawn.ndim == 2 else np.sort(drawn)
        key = drawn.tobytes()
        if key not in found:
            ends = interval(drawn)
            inside = ends is not None and ends.low - 1e-12 <= truth <= ends.high + 1e-12
            found[key] = (inside, ends.high - ends.low) if ends else None
        one = found[key]
        if one is None:
            return None
        hits, width = hits + one[0], width + one[1]
    return hits / draws, width / draws


def row_of_table(kind: str, draws: int) -> str:
    cells = (simulate(kind, size, draws) for size in SIZES)
    texts = ("none" if cell is None else "{:.3f} ({:.2f})".format(*cell) for cell in cells)
    return f"| {kind} | {' | '.join(texts)} |"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_intervals_cover_the_truth(kind: str, size: int) -> None:
    """At most four standard errors are between what is printed, and what is measured here."""
    row = next(line for line in DOCUMENT.read_text().splitlines() if f"| {kind} |" in line)
    printed, found = row.split("|")[2 + SIZES.index(size)].split(), simulate(kind, size, SOME)
    if found is None:
        assert printed == ["none"]
        return
    coverage, width = float(printed[0]), float(printed[1].strip("()"))
    assert coverage >= 0.93
    # The bootstrap's 0.945 is below that in some 300 draws; scores have room.
    assert kind in TIMES or found[0] >= 0.93
    assert found[0] == pytest.approx(coverage, abs=4 * (0.05 * 0.95 / SOME) ** 0.5)
    assert found[1] == pytest.approx(width, rel=0.1)


if __name__ == "__main__":
    print("\n".join(row_of_table(kind, DRAWS) for kind in KINDS))
