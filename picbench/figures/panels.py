"""The kinds of panel that papers' figures are redrawn as; one quantity a panel."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from picbench.figures.canvas import (
    LABEL,
    PALETTE,
    Panel,
    arm_styles,
    canvas,
    draw_legend,
    label_points,
    scale,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Inches that a marker needs in a row of `draw_dots`, and a bar in `draw_bars`.
_DOT, _BAR = 0.085, 0.155

#: What a legend says of a paper's values.
_HOLLOW = "hollow: paper"


@dataclass(frozen=True, slots=True)
class Spot:
    """A value with the ends of its bar; `name` is written beside it unless empty."""

    x: float
    y: float
    low: float
    high: float
    name: str = ""

    def reach(self, middle: float) -> list[list[float]]:
        """From `middle` to the ends of the bar, as matplotlib takes it."""
        return [[max(0.0, middle - self.low)], [max(0.0, self.high - middle)]]


def draw_lines(
    panel: Panel,
    lines: Mapping[str, Sequence[Spot]],
    ticks: Mapping[float, str],
    base: Path,
    printed: Mapping[str, Sequence[tuple[float, float]]] | None = None,
    bottom: float = 0.0,
) -> None:
    """A line an arm; `ticks` name places on the x axis.

    `printed` are a paper's points, drawn hollow. A y axis that is not logarithmic begins at
    `bottom`.
    """
    theirs = printed or {}
    hollow = any(theirs.values())
    deepest = 1 + max((label.count("\n") for label in ticks.values()), default=0)
    with canvas(panel, base, ticks=deepest, legend=_named(lines, hollow=hollow)) as figure:
        axis = figure.subplots()
        styles = arm_styles(lines)
        for name, spots in lines.items():
            colour, marker = styles[name]
            draw_spots(axis, spots, colour, marker)
            for x, y in theirs.get(name, ()):
                axis.plot(x, y, marker, mfc="white", mec=colour, ms=5)
        scale(axis, panel)
        axis.minorticks_off()
        if not panel.log_y:
            axis.set_ylim(bottom=bottom)
        axis.set_xticks(list(ticks), list(ticks.values()))
        _legend(figure, styles, hollow=hollow, joined=lines)


def draw_scatter(
    panel: Panel,
    families: Mapping[str, Sequence[Spot]],
    joined: Sequence[str],
    base: Path,
    printed: Mapping[str, Sequence[Spot]] | None = None,
) -> None:
    """Percents of families of arms; those in `joined` are joined by a line.

    The legend has the families' names; a spot's own name is written beside it. `printed` are a
    paper's values by family, drawn hollow.
    """
    papers = [spot for spots in (printed or {}).values() for spot in spots]
    with canvas(panel, base, 1.75, legend=_named(families, hollow=bool(papers))) as figure:
        axis = figure.subplots()
        styles = arm_styles(families)
        for number, (name, spots) in enumerate(families.items()):
            # Lines have many markers, others one; the first, a small circle, is on top.
            order = 2.0 if name in joined else 3.0 - number / len(families)
            draw_spots(axis, spots, *styles[name], line=name in joined, order=order)
            for theirs in (printed or {}).get(name, ()):
                draw_spots(axis, [theirs], *styles[name], line=False, hollow=True)
        axis.margins(x=0.12)
        scale(axis, panel)
        axis.set_ylim(percent_floor(families.values()), 103)
        _legend(figure, styles, hollow=bool(papers), joined=joined)
        named = [
            (spot.name, spot.x, spot.y, styles[name][0])
            for name, spots in families.items()
            for spot in spots
        ]
        drawn = [mark for name, spots in families.items() for mark in _ink(spots, name in joined)]
        label_points(axis, named, [*drawn, *_ink(papers, line=False)])


def percent_floor(lines: Iterable[Iterable[Spot]]) -> float:
    """Where an axis of percents begins: at tens below all bars, and at 90 at most."""
    return min(90.0, 10 * (min(spot.low for spots in lines for spot in spots) // 10))


def _ink(spots: Sequence[Spot], line: bool) -> Iterator[tuple[float, float]]:
    """Places along bars, and along the line between spots on a logarithmic axis."""
    steps = [step / 8 for step in range(9)]
    for spot in spots:
        yield from ((spot.x, spot.low + step * (spot.high - spot.low)) for step in steps)
    for one, other in pairwise(spots) if line else ():
        ratio, rise = other.x / one.x, other.y - one.y
        yield from ((one.x * ratio**step, one.y + step * rise) for step in steps)


def draw_dots(
    panel: Panel,
    rows: Mapping[str, Mapping[str, Spot]],
    printed: Mapping[str, Mapping[str, Spot]],
    base: Path,
) -> None:
    """A row a workload and a marker an arm: ours filled, with bars, the paper's hollow."""
    styles = arm_styles(dict.fromkeys(arm for row in rows.values() for arm in row))
    hollow = any(printed.values())
    height = max(0.4, _DOT * len(styles)) * len(rows)
    with canvas(panel, base, height, legend=_named(styles, hollow=hollow)) as figure:
        axis = figure.subplots()
        step = 0.8 / max(1, len(styles))
        for number, (workload, row) in enumerate(rows.items()):
            for place, (arm, (colour, marker)) in enumerate(styles.items()):
                y = number - 0.4 + step * (place + 0.5)
                for spots, face in ((row, colour), (printed.get(workload, {}), "white")):
                    if (spot := spots.get(arm)) is not None:
                        style: Any = {"color": colour, "marker": marker, "mfc": face, "mew": 0.8}
                        reach = spot.reach(spot.x)
                        axis.errorbar(spot.x, y, xerr=reach, elinewidth=0.6, capsize=1.5, **style)
            if number:
                axis.axhline(number - 0.5, color="#CCCCCC", lw=0.5)
        _rows(axis, panel, list(rows))
        if not panel.log_x:
            axis.set_xlim(left=0)
        _legend(figure, styles, hollow=hollow)


def _rows(axis: "Axes", panel: Panel, names: Sequence[str]) -> None:
    """A row for each name, the first at the top."""
    scale(axis, replace(panel, y_label=""))
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.grid(visible=False, axis="y")


def draw_bars(panel: Panel, bars: Mapping[str, Spot], base: Path) -> None:
    """A bar a name, with its value beside it; x values of spots count."""
    with canvas(panel, base, _BAR * len(bars) + 0.1) as figure:
        axis = figure.subplots()
        for number, spot in enumerate(bars.values()):
            axis.barh(number, spot.x, color=PALETTE[5], height=0.72, zorder=2)
            black: Any = {"color": "#000000", "lw": 0.7, "capsize": 1.5, "zorder": 3}
            axis.errorbar(spot.x, number, xerr=spot.reach(spot.x), **black)
            axis.annotate(
                f"{spot.x:,.0f}" if spot.x >= 99.95 else f"{spot.x:#.3g}",
                (max(spot.x, spot.high), number),
                xytext=(3, 0),
                textcoords="offset points",
                va="center",
                fontsize=LABEL,
            )
        most = max(max(spot.x, spot.high) for spot in bars.values())
        least = min(spot.x for spot in bars.values())
        wide = (0.5 * least, most * (most / least) ** 0.25 * 1.2)
        axis.set_xlim(wide if panel.log_x else (0, 1.18 * most))
        _rows(axis, panel, list(bars))


def draw_time(
    panel: Panel,
    panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]],
    base: Path,
) -> None:
    """Two panels a row, one a workload: a quantity over time, an arm a line, scales shared."""
    rows = -(-len(panels) // 2)
    arms = list(dict.fromkeys(arm for lines in panels.values() for arm in lines))
    styles = {arm: (colour, "") for arm, (colour, _) in arm_styles(arms).items()}
    with canvas(panel, base, 1.2 * rows, legend=arms) as figure:
        grid = figure.subplots(rows, 2, sharey=True, squeeze=False)
        for axis, (name, lines) in zip(grid.flat, panels.items(), strict=False):
            for arm, (time, share) in lines.items():
                axis.step(time, share, where="post", color=styles[arm][0], lw=0.9)
            axis.set_title(name)
            axis.set_xlim(left=0)
        for axis in list(grid.flat)[len(panels) :]:
            axis.set_visible(False)
        grid[0][0].set_ylim(bottom=0)
        for axis in grid[-1]:
            axis.set_xlabel(panel.x_label)
        for row in grid:
            row[0].set_ylabel(panel.y_label, fontsize=LABEL)
        _legend(figure, styles, hollow=False, joined=arms)


def _named(arms: Iterable[str], *, hollow: bool) -> list[str]:
    """What the legend says."""
    return [*arms, *([_HOLLOW] if hollow else [])]


def _legend(
    figure: Any,
    styles: Mapping[str, tuple[str, str]],
    *,
    hollow: bool,
    joined: Collection[str] = (),
) -> None:
    """Those in `joined` are shown with a line."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=colour, marker=marker, ls="-" if name in joined else "")
        for name, (colour, marker) in styles.items()
    ]
    if hollow:
        handles.append(Line2D([], [], color="#000000", marker="o", mfc="white", ls=""))
    draw_legend(figure, handles, _named(styles, hollow=hollow))


def draw_spots(
    axis: "Axes",
    spots: Sequence[Spot],
    colour: str,
    marker: str,
    *,
    line: bool = True,
    hollow: bool = False,
    order: float = 2.0,
) -> None:
    """Markers with their bars, and a line through them.

    What has a higher `order` covers what has a lower one.
    """
    reaches = [spot.reach(spot.y) for spot in spots]
    axis.errorbar(
        [spot.x for spot in spots],
        [spot.y for spot in spots],
        yerr=[[below[0] for below, _ in reaches], [above[0] for _, above in reaches]],
        color=colour,
        marker=marker,
        mfc="white" if hollow else colour,
        mew=0.8,
        ls="-" if line else "",
        elinewidth=0.6,
        capsize=1.5,
        capthick=0.6,
        zorder=order,
    )
