"""The figures of a report: those of the run's directory, as elements of a page."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

from markupsafe import Markup

from picbench.engines.config import BLOCK_SIZE
from picbench.errors import ConfigError
from picbench.report.contents import RunContents
from picbench.store.manifest import FINAL
from picbench.store.reader import Run
from picbench.tables.metrics import METRICS, SCORE

#: Elements that a figure may have in a page, and attributes that it may not.
_ELEMENTS = {"svg", "g", "path", "use", "text", "tspan", "defs"}
_LEFT_OUT = re.compile("width|height|version|clip-path|on.*")

#: What a hatch becomes.
_TINT = "fill: #888888; fill-opacity: 0.3"

_MEMORY = (
    f"Blocks of {BLOCK_SIZE} tokens, on each arm's own clock, which stops while other arms "
    "compute. Of many steps, those with most in use are drawn."
)
_TREND = (
    "Geometric means (TTFT) and means (reuse) of neighbouring requests, in the order of the run. A "
    "gain that decays as the cache fills shows as a line that climbs towards 1."
)


@dataclass(frozen=True, slots=True)
class HtmlFigure:
    """An SVG element under a title, with what to know of it."""

    title: str
    svg: Markup
    caption: str


@dataclass(frozen=True, slots=True)
class ArmPoint:
    """An arm: its time (positive, less is better) and its score (more is better)."""

    arm: str
    time: float
    score: float


def run_figures(contents: RunContents, name: str) -> Iterator[HtmlFigure]:
    """The figures that a run has something for; ids in them begin with `name`."""
    counts = sorted({arm.timed for arm in contents.arms.values() if arm.timed})
    count = " to ".join(map(str, dict.fromkeys([*counts[:1], *counts[-1:]])))
    titles = {
        "accuracy": ("Score against time to the first token", _frontier_words(contents)),
        "ttft": (
            "Distribution of time to the first token",
            f"Further left is faster; {count} requests an arm.",
        ),
        "memory": ("KV blocks over time", _MEMORY),
        "trend": ("Trend over requests", _TREND),
    }
    for file, (title, caption) in titles.items():
        svg = _drawn(contents.run, file)
        if svg is not None:
            yield HtmlFigure(title, inlined(svg, f"{name}-{file}-", title), caption)


def _drawn(run: Run, name: str) -> bytes | None:
    """What a run that ended has drawn, or would draw by now; None if there is too little of it."""
    kept = run.path / f"{name}.svg"
    if run.manifest["status"] in FINAL and kept.exists():
        return kept.read_bytes()
    from picbench.figures.run import draw_run  # With matplotlib and pandas.

    with TemporaryDirectory() as folder:
        try:
            draw_run(run, name, Path(folder))
        except ConfigError:
            return None
        file = Path(folder, kept.name)
        return file.read_bytes() if file.exists() else None


def inlined(svg: bytes, prefix: str, title: str) -> Markup:
    """A drawn SVG as an element of a page: it loads nothing, and its ids begin with `prefix`.

    Lines are drawn to a tenth of a point. Nothing is clipped or hatched, as that takes addresses.
    """
    root = ElementTree.fromstring(svg)
    for element in [*root.iter()]:
        for child in [*element]:
            if child.tag.rpartition("}")[2] not in _ELEMENTS:
                element.remove(child)
        element.tag = element.tag.rpartition("}")[2]
        given = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
        element.attrib.clear()
        for key, value in given.items():
            if key in ("id", "href"):
                element.set(key, "#"[key == "id" :] + prefix + value.removeprefix("#"))
            elif not _LEFT_OUT.fullmatch(key):
                rounded = re.sub(r"(\d\.\d)\d+", r"\1", value) if key == "d" else value
                element.set(key, re.sub(r"fill: url\([^)]*\)", _TINT, rounded))
    root.attrib |= {"class": "plot", "role": "img", "aria-label": title}
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _frontier_words(contents: RunContents) -> str:
    wait, score = METRICS["ttft_p50_ms"].value, METRICS[SCORE].value
    known = [(name, wait(arm), score(arm)) for name, arm in contents.summaries.items()]
    best = frontier([ArmPoint(arm, x, y) for arm, x, y in known if x and y is not None])
    turn = knee(best)
    names = ", ".join(point.arm for point in best)
    end = f"their knee is {turn.arm}" if turn else "they have no knee"
    return f"Up and to the left is better. No other arm beats {names}; {end}."


def frontier(points: Sequence[ArmPoint]) -> list[ArmPoint]:
    """The points that no other dominates, the fastest first.

    A point dominates another if it is as good in both and better in one; equal points stay both.
    """
    kept = [p for p in points if not any(_dominates(other, p) for other in points)]
    return sorted(kept, key=lambda point: (point.time, point.score))


def _dominates(one: ArmPoint, other: ArmPoint) -> bool:
    as_good = one.time <= other.time and one.score >= other.score
    return as_good and (one.time < other.time or one.score > other.score)


def knee(points: Sequence[ArmPoint]) -> ArmPoint | None:
    """The point of a frontier that is farthest above the line between its ends.

    After Satopaa et al., "Finding a Kneedle in a Haystack" (2011), with logarithms of times, since
    times are compared as ratios. None where no point is above the line, or none is between.
    """
    if len(points) < 3:
        return None
    first, last = points[0], points[-1]
    span, rise = log(last.time / first.time), last.score - first.score
    if span <= 0 or rise <= 0:
        return None

    def above(point: ArmPoint) -> float:
        return (point.score - first.score) / rise - log(point.time / first.time) / span

    best = max(points[1:-1], key=above)
    return best if above(best) > 0 else None
