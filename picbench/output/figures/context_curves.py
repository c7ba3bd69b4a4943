"""Time to the first token against the length of the context."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from picbench.output.figures.style import WIDTH, arm_styles, drawing, write


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
