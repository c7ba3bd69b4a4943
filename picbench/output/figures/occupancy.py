"""KV occupancy over time."""

from collections.abc import Mapping
from pathlib import Path

from picbench.engines.ledger import KINDS
from picbench.output.figures.style import WIDTH, arm_styles, drawing, kind_colours, write
from picbench.output.run_reader import Series

#: Panels: the series of each arm, by name of the workload.
Panels = Mapping[str, Mapping[str, Series]]


def draw_occupancy(panels: Panels, caption: str, base: Path) -> None:
    """One panel a workload, one line an arm: referenced blocks in percent of the pool."""
    with drawing():
        from matplotlib.figure import Figure

        rows = -(-len(panels) // 2)
        figure = Figure(figsize=(WIDTH, 2.6 * rows + 0.6), layout="constrained")
        axes = figure.subplots(rows, min(2, len(panels)), sharey=True, squeeze=False).ravel()
        for axis, (name, arms) in zip(axes, panels.items(), strict=False):
            for arm, (colour, _) in arm_styles(list(arms)).items():
                series = arms[arm]
                share = 100 * series.referenced / series.pool
                axis.step(series.time, share, where="post", color=colour, label=arm, lw=1.2)
            axis.set_title(name, loc="left")
            axis.set_xlabel("time, s")
            axis.set_ylabel("KV referenced, % of pool")
        # Axes are shared, and a limit would be that of the panel drawn last.
        axes[0].set_ylim(0, 1.05 * max(map(_highest, panels.values())))
        for axis in axes[len(panels) :]:
            axis.set_visible(False)
        axes[0].legend(fontsize=7)
        write(figure, caption, base)


def _highest(arms: Mapping[str, Series]) -> float:
    """Most of the pool that any arm's requests held, in percent."""
    return max(float(100 * (arm.referenced / arm.pool).max()) for arm in arms.values()) or 1.0


def draw_kinds(panels: Panels, caption: str, base: Path) -> None:
    """One panel for each workload (rows) and arm (columns): blocks by kind, stacked."""
    kinds = [kind for kind in KINDS if kind != "free"]
    colours = kind_colours()
    with drawing():
        from matplotlib.figure import Figure

        columns = max(len(arms) for arms in panels.values())
        figure = Figure(figsize=(2.4 * columns, 2.0 * len(panels) + 0.8), layout="constrained")
        grid = figure.subplots(len(panels), columns, sharey=True, squeeze=False)
        for row, (name, arms) in zip(grid, panels.items(), strict=True):
            for axis, (arm, series) in zip(row, arms.items(), strict=False):
                axis.stackplot(
                    series.time,
                    [100 * series.blocks[kind] / series.pool for kind in kinds],
                    colors=[colours[kind] for kind in kinds],
                    labels=kinds,
                    step="post",
                )
                axis.set_title(f"{name}: {arm}", fontsize=7, loc="left")
            row[0].set_ylabel("% of pool")
        for axis in grid[-1]:
            axis.set_xlabel("time, s")
        handles, labels = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(kinds), fontsize=7)
        write(figure, caption, base)
