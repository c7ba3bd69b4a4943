"""What a trace's arms compute, as bars."""

from collections.abc import Mapping
from pathlib import Path

from picbench.output.figures.style import PALETTE, drawing, write

#: Inches: a column of a page.
_WIDTH = 3.35


def draw_profile(saved: Mapping[str, float], caption: str, base: Path) -> None:
    """A bar for each arm: the share of prompt tokens that is computed, 1 - `saved`."""
    with drawing():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(_WIDTH, 0.9 + 0.28 * len(saved)), layout="constrained")
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
