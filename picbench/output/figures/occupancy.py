"""KV occupancy over time."""

from collections.abc import Mapping
from pathlib import Path

from picbench.output.figures.paper_canvas import LABEL, Panel, canvas, name_column
from picbench.output.figures.style import arm_styles
from picbench.output.run_reader import Series

#: Panels: the series of each arm, by name of the workload.
Panels = Mapping[str, Mapping[str, Series]]

#: Inches: a panel, all panels at least, and the title of one with what is above it.
_HIGH, _LEAST, _TITLE = 0.52, 1.3, 0.22


def draw_occupancy(panels: Panels, caption: str, base: Path) -> None:
    """Referenced blocks in percent of the pool: a column a workload, a row an arm.

    Arms that fill the pool would hide each other in one panel. Writes ``base.png``, ``base.pdf``
    and ``base.svg``, as papers print them.
    """
    arms = list(dict.fromkeys(arm for found in panels.values() for arm in found))
    about = Panel("time, s", "KV referenced, % of pool", caption)
    high = max(_HIGH, _LEAST / len(arms))
    plot = high * len(arms) + _TITLE * (len(arms) - 1)
    with canvas(about, base, plot=plot, above=_TITLE - 0.1) as figure:
        spaces = {"hspace": _TITLE / high, "wspace": 0.1}
        shape = (len(arms), len(panels))
        grid = figure.subplots(*shape, sharex="col", sharey=True, squeeze=False, gridspec_kw=spaces)
        for column, (name, found) in zip(grid.T, panels.items(), strict=True):
            for axis, (arm, (colour, _)) in zip(column, arm_styles(arms).items(), strict=True):
                axis.set_title(f"{name}: {arm}", fontsize=LABEL, loc="left", pad=2)
                axis.tick_params(pad=2, length=2)
                if arm in found:
                    share = 100 * found[arm].referenced / found[arm].pool
                    steps = {"step": "post", "color": colour, "alpha": 0.35, "lw": 0}
                    axis.fill_between(found[arm].time, share, **steps)
                    axis.step(found[arm].time, share, where="post", color=colour, lw=0.7)
            column[0].set_xlim(left=0)
            column[0].locator_params(axis="x", nbins=4)
            column[-1].set_xlabel(about.x_label, labelpad=2)
        # Axes are shared, and a limit would be that of the panel drawn last.
        grid[0, 0].set_ylim(0, 1.05 * max(map(_highest, panels.values())))
        name_column(figure, list(grid[:, 0]), about.y_label)


def _highest(arms: Mapping[str, Series]) -> float:
    """Most of the pool that any arm's requests held, in percent."""
    shares = (float(100 * (arm.referenced / arm.pool).max()) for arm in arms.values())
    return max(shares, default=0.0) or 1.0
