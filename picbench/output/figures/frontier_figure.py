"""Accuracy against linked tokens, a panel for each data set: families of arms, and the frontier."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from picbench.output.figures.figure_legend import draw_legend, legend_height
from picbench.output.figures.paper_canvas import LABEL, Panel, canvas, name_column
from picbench.output.figures.style import PALETTE

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


#: Panels beside each other, and inches: a panel, and its title with what is above it.
_ACROSS, _HIGH, _TITLE = 2, 0.95, 0.3

_TICKS = (0, 2, 10, 25, 50, 100)


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
    "static": _Family("cacheblend (static)", _ORANGE, "s", hollow=True),
    "mepic": _Family("mepic, 1 and 2 blocks", _PINK, "^", joined=True, size=4.5),
    "other": _Family("other published", "#888888", "v", hollow=True),
    "naive": _Family("naive", "#000000", "X", size=4.0),
    "tuned": _Family("tuned models", _YELLOW, "P", size=4.5),
    "anchor": _Family("ours: anchor", _GREEN, "o", hollow=True),
    "question": _Family("ours: question", _GREEN, "^", hollow=True, size=4.5),
    "document": _Family("ours: document", _GREEN, "D", hollow=True),
    "both": _Family("ours: anchor and document", _GREEN, "D", size=4.0),
    "all": _Family("ours: all three", _GREEN, "*", size=6.0),
}

_GOAL_NAME, _FRONTIER_NAME = "the goal", "frontier of all arms"


def draw_frontier(
    panels: Mapping[str, Sequence[FrontierPoint]],
    goal: tuple[str, float],
    caption: str,
    base: Path,
) -> None:
    """Write ``base.png``, ``base.pdf`` and ``base.svg``, as papers print them.

    `goal` is an arm and a share of the score: to link no more than the one, and keep the other.
    """
    rows = -(-len(panels) // _ACROSS)
    aim = f"The goal: {goal[1]:.2f} of full's score, linking no more than {goal[0]}."
    about = Panel("linked, % of chunk tokens", "kept, % of full's score", f"{aim} {caption}")
    names = _legend_names(panels)
    plot = _HIGH * rows + _TITLE * (rows - 1)
    with canvas(about, base, plot=plot, above=legend_height(names) + 0.05) as figure:
        spaces = {"hspace": _TITLE / _HIGH, "wspace": 0.1}
        axes = figure.subplots(rows, _ACROSS, squeeze=False, sharey=True, gridspec_kw=spaces)
        for axis, (dataset, points) in zip(axes.flat, panels.items(), strict=False):
            _panel(axis, points, goal)
            axis.set_title(dataset, fontsize=LABEL, loc="left", pad=2)
            axis.tick_params(pad=2, length=2)
            _scale(axis)
        low = min(point.low for points in panels.values() for point in points)
        axes[0][0].set_ylim(10 * (10 * low // 1), 103)
        for number, axis in enumerate(axes.flat):
            axis.set_visible(number < len(panels))
            axis.tick_params(labelbottom=number + _ACROSS >= len(panels))
            if number + _ACROSS >= len(panels):
                axis.set_xlabel(about.x_label, labelpad=2)
        name_column(figure, list(axes[:, 0]), about.y_label)
        handles = {
            label: handle
            for axis in axes.flat
            for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        draw_legend(figure, [handles[name] for name in names], names)


def _legend_names(panels: Mapping[str, Sequence[FrontierPoint]]) -> list[str]:
    found = {_family(point) for points in panels.values() for point in points}
    families = [family.name for key, family in _FAMILIES.items() if key in found]
    return [_GOAL_NAME, _FRONTIER_NAME, *families]


def _panel(axis: Any, points: Sequence[FrontierPoint], goal: tuple[str, float]) -> None:
    arm, kept = goal
    budget = next((p.share for p in points if p.arm == arm), 0.0)
    axis.fill_between(
        [-0.3, 103 * budget],
        100 * kept,
        103,
        color=_GOAL,
        alpha=0.13,
        lw=0,
        label=_GOAL_NAME,
    )
    axis.step(
        *_percent(frontier_steps(points)),
        where="post",
        color="#000000",
        lw=0.8,
        alpha=0.6,
        label=_FRONTIER_NAME,
        zorder=1,
    )
    for name, family in _FAMILIES.items():
        found = sorted((p for p in points if _family(p) == name), key=lambda p: p.share)
        if found:
            _draw_family(axis, family, found)


def _scale(axis: Any) -> None:
    """Square roots: most arms link little."""
    import numpy as np

    axis.set_xscale("function", functions=(lambda x: np.sign(x) * np.sqrt(np.abs(x)), _square))
    axis.set_xlim(-0.3, 108)
    axis.set_xticks(_TICKS, [str(tick) for tick in _TICKS])
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
    if name == "naive" and not options:
        return name
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
