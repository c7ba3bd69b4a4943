"""Accuracy against linked tokens, a panel for each data set: families of arms, and the frontier."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from picbench.output.figures.style import PALETTE, drawing, write

_GOAL = "#009E73"


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """An arm on a data set: the share of chunk tokens that it links, and of the score it keeps.

    `low` and `high` are the interval of `kept`. An arm of a tuned model is ``model/arm``.
    """

    arm: str
    share: float
    kept: float
    low: float
    high: float


#: What is written at a point, and by how many points to its right and above it.
_LABELS = {
    "naive": ("naive", (4, -7)),
    "epic:k=64": ("epic", (0, -9)),
    "cacheblend:r=0.5": ("cacheblend", (-39, 2)),
    "mepic": ("mepic", (3, -8)),
}


@dataclass(frozen=True, slots=True)
class _Format:
    """A width for print, in mm, and the letters' size in points.

    `panel` is the height of a row of panels, `around` that of what is above and below them, both in
    inches; `columns` are those of panels, `legend` those of the legend. `labelled` are the arms
    that are named in panels.
    """

    suffix: str
    width: float
    panel: float
    around: float
    columns: int
    legend: int
    font: float
    ticks: tuple[int, ...]
    labelled: tuple[str, ...]


#: A page's text and a column of a paper: in both, letters are about as large as in print.
_FORMATS = (
    _Format("", 170, 1.9, 1.15, 3, 3, 7, (0, 2, 10, 25, 50, 100), tuple(_LABELS)),
    _Format("-column", 85, 1.33, 1.95, 2, 2, 6, (0, 10, 50), ("naive", "mepic")),
)


@dataclass(frozen=True, slots=True)
class _Family:
    """Arms that are drawn alike, and joined by a line where only one number differs."""

    name: str
    colour: str
    marker: str
    joined: bool = False
    hollow: bool = False
    size: float = 3.5


_BLUE, _ORANGE, _GREEN, _PINK, _YELLOW, *_ = PALETTE

_FAMILIES = {
    "epic": _Family("epic, k = 1 to 64", _BLUE, "o", joined=True),
    "cacheblend": _Family("cacheblend, r = 0.05 to 0.5", _ORANGE, "s", joined=True),
    "static": _Family("cacheblend (static), r = 0.15", _ORANGE, "s", hollow=True),
    "mepic": _Family("mepic, 1 and 2 blocks a chunk", _PINK, "^", joined=True, size=4.5),
    "other": _Family("other published arms", "#888888", "v", hollow=True),
    "tuned": _Family("tuned: block-attention, kvlink", _YELLOW, "P", size=4.5),
    "anchor": _Family("ours: anchor", _GREEN, "o", hollow=True),
    "question": _Family("ours: question", _GREEN, "^", hollow=True, size=4.5),
    "document": _Family("ours: document", _GREEN, "D", hollow=True),
    "both": _Family("ours: anchor and document", _GREEN, "D", size=4.0),
    "all": _Family("ours: anchor, document, question", _GREEN, "*", size=6.0),
}

#: Points that keep more of the score are not labelled: there, many are one above the other.
_CROWDED = 0.98


def draw_frontier(
    panels: Mapping[str, Sequence[FrontierPoint]],
    goal: tuple[str, float],
    caption: str,
    base: Path,
) -> None:
    """Write ``base.svg`` and ``base.png``, 170 mm wide, and ``base-column``, 85 mm wide.

    `goal` is an arm and a share of the score: to link no more than the one, and keep the other.
    """
    for form in _FORMATS:
        with drawing():
            import matplotlib

            title = form.font + 1
            with matplotlib.rc_context({"font.size": form.font, "axes.titlesize": title}):
                figure = _draw(panels, goal, form)
                write(figure, caption, base.with_name(base.name + form.suffix))


def _draw(
    panels: Mapping[str, Sequence[FrontierPoint]], goal: tuple[str, float], form: _Format
) -> Any:
    from matplotlib.figure import Figure

    columns = min(form.columns, len(panels))
    rows = -(-len(panels) // columns)
    low = min(point.low for points in panels.values() for point in points)
    size = (form.width / 25.4, form.panel * rows + form.around)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for axis, (dataset, points) in zip(axes.flat, panels.items(), strict=False):
        _panel(axis, points, goal, form.labelled)
        axis.set_title(dataset)
    axes[0][0].set_ylim(10 * (10 * low // 1), 103)
    _scale(axes[0][0], form.ticks)
    for axis in axes[-1]:
        axis.set_xlabel("linked, % of chunk tokens")
    for row in axes:
        row[0].set_ylabel("kept, % of full's score")
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    handles = {
        label: handle
        for axis in axes.flat
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(),
        handles,
        loc="outside upper center",
        ncols=form.legend,
        fontsize=form.font - 0.7,
        columnspacing=1.0,
        handlelength=1.5,
    )
    return figure


def _panel(
    axis: Any,
    points: Sequence[FrontierPoint],
    goal: tuple[str, float],
    labelled: Sequence[str],
) -> None:
    arm, kept = goal
    budget = next((p.share for p in points if p.arm == arm), 0.0)
    axis.fill_between(
        [-0.3, 103 * budget],
        100 * kept,
        103,
        color=_GOAL,
        alpha=0.13,
        lw=0,
        label=f"goal: {kept:.2f} of full, links no more than {arm}",
    )
    axis.step(
        *_percent(frontier_steps(points)),
        where="post",
        color="#000000",
        lw=0.8,
        alpha=0.6,
        label="frontier of all arms",
        zorder=1,
    )
    for name, family in _FAMILIES.items():
        found = sorted((p for p in points if _family(p) == name), key=lambda p: p.share)
        if found:
            _draw_family(axis, family, found)
    for point in points:
        if point.arm in labelled and point.kept < _CROWDED:
            text, offset = _LABELS[point.arm]
            at = (100 * point.share, 100 * point.kept)
            axis.annotate(text, at, xytext=offset, textcoords="offset points", fontsize=5.5)


def _scale(axis: Any, ticks: Sequence[int]) -> None:
    """Square roots: most arms link little."""
    import numpy as np

    axis.set_xscale("function", functions=(lambda x: np.sign(x) * np.sqrt(np.abs(x)), _square))
    axis.set_xlim(-0.3, 108)
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()


def _square(x: Any) -> Any:
    import numpy as np

    return np.sign(x) * np.square(x)


def _draw_family(axis: Any, family: _Family, points: Sequence[FrontierPoint]) -> None:
    axis.errorbar(
        *_percent([(p.share, p.kept) for p in points]),
        yerr=[
            [100 * (p.kept - p.low) for p in points],
            [100 * (p.high - p.kept) for p in points],
        ],
        color=family.colour,
        marker=family.marker,
        mfc="white" if family.hollow else family.colour,
        mew=0.8,
        ms=family.size,
        ls="-" if family.joined else "",
        lw=0.9,
        elinewidth=0.5,
        label=family.name,
    )


def frontier_steps(points: Sequence[FrontierPoint]) -> list[tuple[float, float]]:
    """The most that is kept by arms that link no more, at each share at which it grows."""
    steps: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda p: (p.share, -p.kept)):
        if not steps or point.kept > steps[-1][1]:
            steps.append((point.share, point.kept))
    return [*steps, (1.0, steps[-1][1])] if steps else []


def _percent(pairs: Sequence[tuple[float, float]]) -> Iterator[list[float]]:
    yield [100 * share for share, _ in pairs]
    yield [100 * kept for _, kept in pairs]


def _family(point: FrontierPoint) -> str | None:
    """The family of an arm; None for those that are only in the table."""
    if "/" in point.arm:
        return "tuned"
    name, *options = point.arm.split(":")
    if name in ("full", "prefix"):
        return None
    own = {option for option in options if option in _OWN_OPTIONS}
    if own:
        return _OF_OWN[frozenset(own)]
    if name == "cacheblend":
        return "static" if "select=first" in options else name
    if name == "epic" and options[0] != "k=0" and len(options) == 1:
        return name
    return name if name == "mepic" and "pad=paper" not in options else "other"


_ANCHOR, _DOCUMENT, _QUESTION = _OWN_OPTIONS = (
    "anchored=on",
    "context=document",
    "select=question",
)

_OF_OWN = {
    frozenset({_ANCHOR}): "anchor",
    frozenset({_DOCUMENT}): "document",
    frozenset({_QUESTION}): "question",
    frozenset({_ANCHOR, _DOCUMENT}): "both",
    frozenset({_ANCHOR, _DOCUMENT, _QUESTION}): "all",
}
