"""Time to the first token against the length of the context."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from picbench.output.figures.paper_canvas import (
    Panel,
    beside,
    canvas,
    label_ends,
    name_column,
    scale,
)
from picbench.output.figures.paper_panels import Spot, draw_spots
from picbench.output.figures.style import arm_styles

#: Arms that stay below this share of the highest median have a panel of their own, too.
_NEAR = 0.5

#: Inches: a panel, and what is between two of them.
_HIGH, _BETWEEN = 1.3, 0.1

_OTHERS = "the others, below"


def draw_context(
    lines: Mapping[str, Mapping[int, Sequence[float]]], caption: str, base: Path
) -> None:
    """A line for each arm: medians of milliseconds at each length, from lowest to highest.

    Arms that others press to the axis are drawn again below, on a scale of their own. Writes
    ``base.png``, ``base.pdf`` and ``base.svg``, as papers print them.
    """
    spots = {arm: _spots(found) for arm, found in lines.items()}
    highest = {arm: max(spot.y for spot in found) for arm, found in spots.items()}
    near = [arm for arm in spots if highest[arm] < _NEAR * max(highest.values())]
    panels = [list(spots), near] if near else [list(spots)]
    about = Panel("context, thousand tokens", "time to the first token, ms", _note(lines, caption))
    names = _names(lines)
    plot = _HIGH * len(panels) + _BETWEEN * (len(panels) - 1)
    styles = arm_styles(list(lines))
    with canvas(about, base, plot=plot, right=beside([*names.values(), _OTHERS])) as figure:
        spaces = {"hspace": _BETWEEN / _HIGH}
        grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False, gridspec_kw=spaces)
        for number, (axis, arms) in enumerate(zip(grid[:, 0], panels, strict=True)):
            for arm in arms:
                draw_spots(axis, spots[arm], *styles[arm])
            last = number == len(panels) - 1
            scale(axis, Panel(about.x_label if last else "", "", ""))
            axis.set_ylim(bottom=0)
            named = [arm for arm in arms if last or arm not in near]
            ends = [(names[arm], spots[arm][-1], styles[arm][0]) for arm in named]
            if not last:
                highest_near = max((spots[arm][-1] for arm in near), key=lambda spot: spot.y)
                ends.append((_OTHERS, highest_near, "#444444"))
            label_ends(axis, [(name, spot.x, spot.y, colour) for name, spot, colour in ends])
        name_column(figure, list(grid[:, 0]), about.y_label)


def _spots(found: Mapping[int, Sequence[float]]) -> list[Spot]:
    return [
        Spot(tokens / 1000, median(values), min(values), max(values))
        for tokens, values in sorted(found.items())
    ]


def _names(arms: Mapping[str, object]) -> dict[str, str]:
    """Arms without their options, where these do not tell them apart."""
    short = {arm: arm.partition(":")[0] for arm in arms}
    return short if len(set(short.values())) == len(short) else {arm: arm for arm in arms}


def _note(arms: Mapping[str, object], caption: str) -> str:
    left_out = [arm for arm, name in _names(arms).items() if arm != name]
    options = f" Arms: {', '.join(left_out)}." if left_out else ""
    return caption.replace("`", "") + options
