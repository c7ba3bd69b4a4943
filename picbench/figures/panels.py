"""The kinds of panel that papers' figures are redrawn as; one quantity a panel."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from picbench.figures.canvas import (
    LABEL,
    Panel,
    beside,
    canvas,
    draw_legend,
    label_ends,
    label_points,
    legend_height,
    scale,
)
from picbench.figures.style import MARKERS, PALETTE, arm_styles

#: Points from an arm's bars to the next arm's at the same place.
_STEP = 1.5

#: Points between the names of ticks.
_SPACE = 2.0

#: Inches that a marker needs in a row of `draw_dots`.
_DOT = 0.085


@dataclass(frozen=True, slots=True)
class Spot:
    """A value with the ends of its bar; `name` is written beside it unless empty."""

    x: float
    y: float
    low: float
    high: float
    name: str = ""


def draw_lines(
    panel: Panel,
    lines: Mapping[str, Sequence[Spot]],
    ticks: Mapping[float, str],
    base: Path,
    printed: Mapping[str, Sequence[tuple[float, float]]] | None = None,
    bottom: float = 0.0,
) -> None:
    """A line an arm, named where it ends; `ticks` name places on the x axis.

    `printed` are a paper's points, drawn hollow. A y axis that is not logarithmic begins at
    `bottom`.
    """
    deepest = 1 + max((label.count("\n") for label in ticks.values()), default=0)
    with canvas(panel, base, right=beside(lines), ticks=deepest) as figure:
        axis = figure.subplots()
        styles = arm_styles(list(lines))
        shifts = _shifts(axis, lines)
        for name, spots in lines.items():
            colour, marker = styles[name]
            draw_spots(axis, spots, colour, marker, shift=shifts[name])
            for x, y in (printed or {}).get(name, ()):
                found = axis.plot(x, y, marker, mfc="white", mec=colour, ms=5)
                _shift(axis, found, shifts[name])
        scale(axis, panel)
        axis.margins(x=0.05 + max(map(abs, shifts.values()), default=0.0) / _width(axis))
        axis.set_xticks(list(ticks))
        axis.minorticks_off()
        if not panel.log_y:
            axis.set_ylim(bottom=bottom)
        axis.set_xticks(list(ticks), _tick_names(axis, ticks))
        ends = [(name, max(spots, key=lambda s: s.x)) for name, spots in lines.items() if spots]
        label_ends(
            axis,
            [(name, *_moved(axis, spot, shifts[name]), styles[name][0]) for name, spot in ends],
        )


def _shifts(axis: Any, lines: Mapping[str, Sequence[Spot]]) -> dict[str, float]:
    """Points by which each line is moved aside, so that bars at one place can be told apart."""
    places = len({spot.x for spots in lines.values() for spot in spots})
    step = min(_STEP, 0.8 * _width(axis) / max(1, places * len(lines)))
    middle = (len(lines) - 1) / 2
    return {name: step * (number - middle) for number, name in enumerate(lines)}


def _tick_names(axis: Any, ticks: Mapping[float, str]) -> list[str]:
    """Names of ticks, without those that would touch the next one's. Needs final limits."""
    low, _ = axis.get_ylim()
    at = {x: float(axis.transData.transform((x, low))[0]) * 72 / axis.figure.dpi for x in ticks}
    names: dict[float, str] = {}
    end = float("inf")
    for x in sorted(ticks, reverse=True):
        half = 0.3 * LABEL * max(map(len, ticks[x].split("\n")))
        names[x] = ticks[x] if at[x] + half + _SPACE < end else ""
        end = at[x] - half if names[x] else end
    return [names[x] for x in ticks]


def _width(axis: Any) -> float:
    """Points."""
    return float(axis.get_window_extent().width * 72 / axis.figure.dpi)


def _moved(axis: Any, spot: Spot, points: float) -> tuple[float, float]:
    """The x and y at which a spot is drawn that is moved aside. Needs final limits."""
    x, y = axis.transData.transform((spot.x, spot.y))
    x, y = axis.transData.inverted().transform((x + points * axis.figure.dpi / 72, y))
    return float(x), float(y)


def _shift(axis: Any, drawn: Iterable[Any], points: float) -> None:
    """Move what is drawn; afterwards, as the axes' limits are of data that is where it is."""
    from matplotlib.transforms import ScaledTranslation

    aside = ScaledTranslation(points / 72, 0, axis.figure.dpi_scale_trans)
    for artist in drawn:
        artist.set_transform(axis.transData + aside)


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
    hollow = any((printed or {}).values())
    above = legend_height(_legend_names(families, hollow=hollow))
    with canvas(panel, base, plot=1.75, right=0.2, above=above) as figure:
        axis = figure.subplots()
        styles = arm_styles(list(families))
        for number, (name, spots) in enumerate(families.items()):
            colour, marker = styles[name]
            # Lines have many markers, others one, of which the first, a small circle, is on top.
            order = 2.0 if name in joined else 3.0 - number / len(families)
            draw_spots(axis, spots, colour, marker, line=name in joined, order=order)
            for theirs in (printed or {}).get(name, ()):
                draw_spots(axis, [theirs], colour, marker, line=False, hollow=True)
        axis.margins(x=0.12)
        scale(axis, panel)
        axis.set_ylim(percent_floor(families.values()), 103)
        named = [
            (spot.name, spot.x, spot.y, styles[name][0])
            for name, spots in families.items()
            for spot in spots
        ]
        papers = [spot for spots in (printed or {}).values() for spot in spots]
        named += [("", spot.x, spot.y, "") for spot in papers]
        drawn = [mark for name, spots in families.items() for mark in _ink(spots, name in joined)]
        drawn += _ink(papers, line=False)
        label_points(axis, named, drawn)
        _legend(figure, styles, hollow=hollow, joined=joined)


def percent_floor(lines: Iterable[Iterable[Spot]]) -> float:
    """Where an axis of percents begins: at tens below all bars, and at 90 at most."""
    return min(90.0, 10 * (min(spot.low for spots in lines for spot in spots) // 10))


def _ink(spots: Sequence[Spot], line: bool) -> Iterator[tuple[float, float]]:
    """Places along bars, and along the line between spots."""
    steps = [step / 16 for step in range(17)]
    for spot in spots:
        yield from ((spot.x, spot.low + step * (spot.high - spot.low)) for step in steps)
    for one, other in pairwise(spots) if line else ():
        # Along a straight line on a logarithmic axis.
        yield from (
            (one.x * (other.x / one.x) ** step, one.y + step * (other.y - one.y)) for step in steps
        )


def draw_dots(
    panel: Panel,
    rows: Mapping[str, Mapping[str, Spot]],
    printed: Mapping[str, Mapping[str, Spot]],
    base: Path,
) -> None:
    """A row a workload and a marker an arm: ours filled, with bars, the paper's hollow."""
    arms = list(dict.fromkeys(arm for row in rows.values() for arm in row))
    colours = {arm: (PALETTE[n % 8], MARKERS[n % 8]) for n, arm in enumerate(arms)}
    height = max(0.4, _DOT * len(arms)) * len(rows)
    hollow = any(printed.values())
    above = legend_height(_legend_names(arms, hollow=hollow))
    with canvas(replace(panel, y_label=""), base, plot=height, above=above) as figure:
        axis = figure.subplots()
        figure.subplots_adjust(left=0.27)
        step = 0.8 / max(1, len(arms))
        for number, (workload, row) in enumerate(rows.items()):
            for place, arm in enumerate(arms):
                y = number - 0.4 + step * (place + 0.5)
                colour, marker = colours[arm]
                if arm in row:
                    _across(axis, row[arm], y, colour, marker, filled=True)
                if (theirs := printed.get(workload, {}).get(arm)) is not None:
                    _across(axis, theirs, y, colour, marker, filled=False)
            if number:
                axis.axhline(number - 0.5, color="#CCCCCC", lw=0.5)
        scale(axis, replace(panel, y_label=""))
        axis.set_yticks(range(len(rows)), list(rows))
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.grid(visible=False, axis="y")
        if not panel.log_x:
            axis.set_xlim(left=0)
        _legend(figure, colours, hollow=hollow)


def draw_bars(panel: Panel, bars: Mapping[str, Spot], base: Path) -> None:
    """A bar a name, with its value beside it; x values of spots count."""
    height = 0.155 * len(bars) + 0.1
    with canvas(replace(panel, y_label=""), base, plot=height, right=0.2) as figure:
        axis = figure.subplots()
        longest = max(map(len, bars))
        figure.subplots_adjust(left=min(0.5, 0.05 + 0.0155 * longest))
        for number, spot in enumerate(bars.values()):
            error = [[max(0.0, spot.x - spot.low)], [max(0.0, spot.high - spot.x)]]
            axis.barh(number, spot.x, color=PALETTE[5], height=0.72, zorder=2)
            axis.errorbar(
                spot.x, number, xerr=error, color="#000000", lw=0.7, capsize=1.5, zorder=3
            )
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
        axis.set_xlim(
            (0.5 * least, most * (most / least) ** 0.25 * 1.2) if panel.log_x else (0, 1.18 * most)
        )
        scale(axis, replace(panel, y_label=""))
        axis.set_yticks(range(len(bars)), list(bars))
        axis.set_ylim(len(bars) - 0.5, -0.5)
        axis.grid(visible=False, axis="y")


def draw_time(
    panel: Panel,
    panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]],
    base: Path,
) -> None:
    """Two panels a row, one a workload: a quantity over time, an arm a line, scales shared."""
    rows = -(-len(panels) // 2)
    arms = list(dict.fromkeys(arm for lines in panels.values() for arm in lines))
    colours = {arm: (PALETTE[n % 8], "") for n, arm in enumerate(arms)}
    with canvas(panel, base, plot=1.0 * rows, above=legend_height(arms) + 0.08) as figure:
        grid = figure.subplots(
            rows, 2, sharey=True, squeeze=False, gridspec_kw={"hspace": 0.55, "wspace": 0.12}
        )
        for axis, (name, lines) in zip(grid.flat, panels.items(), strict=False):
            for arm, (time, share) in lines.items():
                axis.step(time, share, where="post", color=colours[arm][0], lw=0.9)
            axis.set_title(name, fontsize=LABEL, loc="left", pad=2)
            axis.tick_params(pad=2, length=2)
            axis.set_xlim(left=0)
        for axis in list(grid.flat)[len(panels) :]:
            axis.set_visible(False)
        grid[0][0].set_ylim(bottom=0)
        for axis in grid[-1]:
            axis.set_xlabel(panel.x_label, labelpad=2)
        for row in grid:
            row[0].set_ylabel(panel.y_label, labelpad=2, fontsize=LABEL)
        _legend(figure, colours, hollow=False, joined=arms)


def _legend_names(arms: Iterable[str], *, hollow: bool) -> list[str]:
    """What the legend says."""
    return [*arms, *(["hollow: paper"] if hollow else [])]


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
    draw_legend(figure, handles, _legend_names(styles, hollow=hollow))


def draw_spots(
    axis: Any,
    spots: Sequence[Spot],
    colour: str,
    marker: str,
    *,
    line: bool = True,
    hollow: bool = False,
    shift: float = 0.0,
    order: float = 2.0,
) -> None:
    """Markers with their bars, and a line through them; all `shift` points to the right.

    What has a higher `order` covers what has a lower one.
    """
    found = axis.errorbar(
        [spot.x for spot in spots],
        [spot.y for spot in spots],
        yerr=[
            [max(0.0, spot.y - spot.low) for spot in spots],
            [max(0.0, spot.high - spot.y) for spot in spots],
        ],
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
    _shift(axis, found.get_children(), shift)


def _across(axis: Any, spot: Spot, y: float, colour: str, marker: str, *, filled: bool) -> None:
    axis.errorbar(
        spot.x,
        y,
        xerr=[[max(0.0, spot.x - spot.low)], [max(0.0, spot.high - spot.x)]],
        color=colour,
        marker=marker,
        mfc=colour if filled else "white",
        mew=0.8,
        elinewidth=0.6,
        capsize=1.5,
    )
