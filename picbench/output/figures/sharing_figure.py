"""Time per token against how many requests share a chunk."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from picbench.output.figures.style import WIDTH, arm_styles, drawing, write


def draw_sharing(
    lines: Mapping[str, Mapping[int, Sequence[float]]],
    tokens: Mapping[int, int],
    caption: str,
    base: Path,
) -> None:
    """A line for each arm: medians of milliseconds at each degree, from lowest to highest.

    `tokens` are those of a prompt at each degree.
    """
    with drawing():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(WIDTH, 4.4), layout="constrained")
        axis = figure.subplots()
        for arm, (colour, marker) in arm_styles(list(lines)).items():
            points = sorted(lines[arm].items())
            middle = [median(values) for _, values in points]
            low = [m - min(values) for m, (_, values) in zip(middle, points, strict=True)]
            high = [max(values) - m for m, (_, values) in zip(middle, points, strict=True)]
            axis.errorbar(
                [degree for degree, _ in points],
                middle,
                yerr=[low, high],
                color=colour,
                marker=marker,
                lw=1.2,
                capsize=2,
                label=arm,
            )
        degrees = sorted(tokens)
        axis.set_xscale("log", base=2)
        axis.set_xticks(degrees, [f"{d}\n{tokens[d] / 1000:.0f}k" for d in degrees])
        axis.set_xlabel("requests that read a chunk, and tokens of a prompt")
        axis.set_ylabel("time per token, ms")
        axis.set_ylim(bottom=0)
        axis.legend()
        write(figure, caption, base)
