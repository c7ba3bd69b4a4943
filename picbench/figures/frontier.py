"""Accuracy against linked tokens, a panel for each data set: families of arms, and the frontier."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from picbench.figures.canvas import (
    COLUMN,
    LABEL,
    PALETTE,
    Panel,
    canvas,
    draw_legend,
    drawing,
    write,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GOAL = "#009E73"

#: Panels beside each other, and inches: a panel with its title, and a row of ratios.
_ACROSS, _HIGH, _ROW = 2, 1.15, 0.17


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
    panels: Mapping[str, Sequence[FrontierPoint]], goal: tuple[str, float], caption: str, base: Path
) -> None:
    """Write ``base.png``, ``base.pdf`` and ``base.svg``, as papers print them.

    `goal` is an arm and a share of the score: to link no more than the one, and keep the other.
    """
    rows = -(-len(panels) // _ACROSS)
    aim = f"The goal: {goal[1]:.2f} of full's score, linking no more than {goal[0]}."
    about = Panel("linked, % of chunk tokens", "kept, % of full's score", f"{aim} {caption}")
    found = {_family(point) for points in panels.values() for point in points}
    families = [family.name for key, family in _FAMILIES.items() if key in found]
    names = [_GOAL_NAME, _FRONTIER_NAME, *families]
    with canvas(about, base, _HIGH * rows, legend=names) as figure:
        axes = figure.subplots(rows, _ACROSS, squeeze=False, sharey=True)
        for axis, (dataset, points) in zip(axes.flat, panels.items(), strict=False):
            _panel(axis, points, goal)
            axis.set_title(dataset)
        low = min(point.low for points in panels.values() for point in points)
        axes[0][0].set_ylim(10 * (10 * low // 1), 103)
        handles: dict[str, Any] = {}
        for number, axis in enumerate(axes.flat):
            last = number + _ACROSS >= len(panels)
            axis.set_visible(number < len(panels))
            axis.tick_params(labelbottom=last)
            axis.set_xlabel(about.x_label if last else "")
            drawn, labels = axis.get_legend_handles_labels()
            handles |= dict(zip(labels, drawn, strict=True))
        figure.supylabel(about.y_label)
        draw_legend(figure, [handles[name] for name in names], names)


def _panel(axis: Any, points: Sequence[FrontierPoint], goal: tuple[str, float]) -> None:
    arm, kept = goal
    budget = next((p.share for p in points if p.arm == arm), 0.0)
    area = {"color": _GOAL, "alpha": 0.13, "lw": 0, "label": _GOAL_NAME}
    axis.fill_between([-0.3, 103 * budget], 100 * kept, 103, **area)
    line = {"color": "#000000", "lw": 0.8, "alpha": 0.6, "label": _FRONTIER_NAME, "zorder": 1}
    axis.step(*_percent(frontier_steps(points)), where="post", **line)
    for name, family in _FAMILIES.items():
        found = sorted((p for p in points if _family(p) == name), key=lambda p: p.share)
        if not found:
            continue
        axis.errorbar(
            *_percent([(p.share, p.kept) for p in found]),
            yerr=[
                [100 * (p.kept - p.low) for p in found],
                [100 * (p.high - p.kept) for p in found],
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
    # Square roots: most arms link little.
    axis.set_xscale(
        "function",
        functions=(lambda x: np.sign(x) * np.sqrt(np.abs(x)), lambda x: np.sign(x) * np.square(x)),
    )
    axis.set_xlim(-0.3, 108)
    axis.set_xticks(_TICKS, [str(tick) for tick in _TICKS])
    axis.minorticks_off()


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


#: Families of the options that are picbench's own.
_OWN = {
    frozenset({"anchor=head"}): "anchor",
    frozenset({"context=document"}): "document",
    frozenset({"select=question"}): "question",
    frozenset({"anchor=head", "select=question"}): "question",
    frozenset({"context=document", "select=question"}): "question",
    frozenset({"anchor=head", "context=document"}): "both",
    frozenset({"anchor=head", "context=document", "select=question"}): "all",
}


def _family(point: FrontierPoint) -> str | None:
    """The family of an arm; None for those that are only in the table."""
    name, *options = re.sub(":anchor=[^:]+", ":anchor=head", point.arm).split(":")
    if "/" in point.arm:
        return "tuned"
    if own := frozenset(options) & frozenset().union(*_OWN):
        return _OWN[own]
    match name:
        case "full" | "prefix":
            return None
        case "naive" if not options:
            return name
        case "cacheblend":
            return "static" if "select=first" in options else name
        case "epic" if len(options) == 1 and options != ["k=0"]:
            return name
        case "mepic" if "pad=paper" not in options:
            return name
    return "other"


#: Ratios beyond this and its inverse have the colour of the end of the scale.
_MOST = 3.0


@dataclass(frozen=True, slots=True)
class RatioPanel:
    """A panel: ratios by reuse and by (chunks, tokens of a chunk)."""

    title: str
    values: Mapping[tuple[float, tuple[int, int]], float]


def draw_ratios(panels: Sequence[RatioPanel], note: str, base: Path) -> None:
    """A cell for each ratio, panels below each other: blue below 1, orange above.

    Writes ``base.png``, ``base.pdf`` and ``base.svg``, as papers print them.
    """
    reuses = sorted({reuse for panel in panels for reuse, _ in panel.values})
    sizes = sorted(
        {size for panel in panels for _, size in panel.values},
        key=lambda size: (size[0] * size[1], size[0]),
    )
    if any(len(panel.values) < len(reuses) * len(sizes) for panel in panels):
        note += " Grey: not measured."
    about = Panel("chunk tokens that recur", "chunks x tokens", note)
    with canvas(about, base, (_ROW * len(sizes) + 0.14) * len(panels)) as figure:
        grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False)
        axes: list[Axes] = list(grid[:, 0])
        for axis, panel in zip(axes, panels, strict=True):
            _draw(axis, panel, reuses, sizes)
        axes[-1].set_xticks([n + 0.5 for n in range(len(reuses))], [f"{r:.0%}" for r in reuses])
        axes[-1].set_xlabel(about.x_label)
        figure.supylabel(about.y_label)


def _draw(
    axis: "Axes", panel: RatioPanel, reuses: Sequence[float], sizes: Sequence[tuple[int, int]]
) -> None:
    from matplotlib.colors import LinearSegmentedColormap, LogNorm
    from matplotlib.patches import Rectangle

    # Okabe and Ito's sky blue and orange: light enough for black letters.
    colours = LinearSegmentedColormap.from_list("ratio", ("#56B4E9", "#FFFFFF", "#E69F00"))
    norm = LogNorm(1 / _MOST, _MOST, clip=True)
    for (reuse, size), ratio in panel.values.items():
        row, column = sizes.index(size), reuses.index(reuse)
        colour = colours(norm(ratio))
        cell = Rectangle((column, row), 1, 1, facecolor=colour, edgecolor="#BBBBBB", linewidth=0.3)
        axis.add_patch(cell)
        # Three places where two would not say on which side of 1 it is.
        text = f"{ratio:.3f}" if f"{ratio:.2f}" == "1.00" and ratio != 1 else f"{ratio:.2f}"
        place: dict[str, Any] = {"ha": "center", "va": "center_baseline", "fontsize": LABEL}
        axis.text(column + 0.5, row + 0.5, text, **place)
    axis.set_facecolor("#DDDDDD")
    axis.set_title(panel.title)
    axis.set_yticks([n + 0.5 for n in range(len(sizes))], [f"{c} x {t}" for c, t in sizes])
    axis.set_xlim(0, len(reuses))
    axis.set_ylim(len(sizes), 0)
    axis.tick_params(pad=3, length=0)
    axis.grid(visible=False)
    axis.spines[:].set_visible(True)


def draw_profile(saved: Mapping[str, float], caption: str, base: Path) -> None:
    """A bar for each arm: the share of prompt tokens that is computed, 1 - `saved`."""
    with drawing(COLUMN, 0.9 + 0.28 * len(saved)) as figure:
        axis = figure.subplots()
        shares = [100 * (1 - share) for share in saved.values()]
        bars = axis.barh(list(saved), shares, color=PALETTE[0], height=0.6)
        axis.bar_label(bars, [f"{share:.0f}" for share in shares], padding=2, fontsize=7)
        axis.invert_yaxis()
        axis.set_xlim(0, max(115.0, 1.15 * max(shares)))
        axis.set_xlabel("computed prompt tokens, %", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.grid(visible=False, axis="y")
        write(figure, caption, base)
