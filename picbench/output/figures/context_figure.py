"""Latency against a setting of a workload, or against the length of the context."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from picbench.output.figures.style import WIDTH, arm_styles, drawing, write


@dataclass(frozen=True, slots=True)
class Line:
    """One arm's values at each point: mean and deviation (0 of a single run)."""

    latency: Sequence[tuple[float, float]]
    occupancy: Sequence[tuple[float, float]]


def draw_sweep(
    values: Sequence[float], lines: Mapping[str, Line], varies: str, caption: str, base: Path
) -> None:
    """Two y axes, as in MEPIC's Figures 7 and 8: makespan (dashed, left), peak KV (solid, right).

    `values` are the points on the x axis, `lines` has an arm's values at each of them.
    """
    with drawing():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(WIDTH, 4.4), layout="constrained")
        left = figure.subplots()
        right = left.twinx()
        right.grid(visible=False)
        for arm, (colour, marker) in arm_styles(list(lines)).items():
            line = lines[arm]
            _draw(left, values, line.latency, color=colour, marker=marker, ls="--", mfc="white")
            _draw(right, values, line.occupancy, color=colour, marker=marker, ls="-", label=arm)
        left.set_xlabel(varies)
        left.set_xticks(values, [f"{value:g}" for value in values])
        left.set_ylabel("total latency (makespan), s: dashed, hollow")
        right.set_ylabel("peak KV referenced, % of pool: solid, filled")
        left.set_ylim(bottom=0)
        right.set_ylim(bottom=0)
        handles, labels = right.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=len(labels), fontsize=7)
        write(figure, caption, base)


def _draw(axis: Any, x: Sequence[float], points: Sequence[tuple[float, float]], **how: Any) -> None:
    means = [mean for mean, _ in points]
    axis.errorbar(x, means, yerr=[spread for _, spread in points], capsize=2, lw=1.2, **how)


def draw_context(
    lines: Mapping[str, Mapping[int, Sequence[float]]], caption: str, base: Path
) -> None:
    """A line for each arm: medians of milliseconds at each length, from lowest to highest."""
    with drawing():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(WIDTH, 4.4), layout="constrained")
        for axis, scale in zip(figure.subplots(1, 2), ("linear", "log"), strict=True):
            for arm, (colour, marker) in arm_styles(list(lines)).items():
                points = sorted(lines[arm].items())
                middle = [median(values) for _, values in points]
                low = [m - min(values) for m, (_, values) in zip(middle, points, strict=True)]
                high = [max(values) - m for m, (_, values) in zip(middle, points, strict=True)]
                axis.errorbar(
                    [tokens / 1000 for tokens, _ in points],
                    middle,
                    yerr=[low, high],
                    color=colour,
                    marker=marker,
                    ms=3,
                    lw=1.2,
                    capsize=2,
                    label=arm,
                )
            axis.set_xlabel("context, thousand tokens")
            axis.set_ylabel("time to the first token, ms")
            axis.set_yscale(scale)
        axis.legend(fontsize=7)
        write(figure, caption, base)
