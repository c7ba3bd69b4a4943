"""How arms fared over a run: a gain that lasts until the cache is full shows here."""

from pathlib import Path

import numpy as np
import pandas as pd

from picbench.figures.style import WIDTH, arm_styles, drawing, line_style, write

#: Groups of neighbouring requests on a line, and requests in one at least.
_GROUPS, _GROUP = 20, 5

#: Names up to so many characters fit four to a line.
_SHORT = 24


def draw_trend(samples: pd.DataFrame, caption: str, base: Path, full: str | None = None) -> None:
    """TTFT over that of the arm `full`, or TTFT itself, and reuse, over the requests of each arm.

    `samples` is `samples_frame`'s. Points are geometric means (TTFT) and means (reuse) of groups of
    neighbours; a panel without two of an arm is left out, and without any nothing is drawn.
    """
    waits = samples["ttft_ms"].astype(float).where(samples["timed"].astype(bool))
    label = "TTFT, ms"
    if full in samples["arm"].values:
        by, theirs = ["sample", "repeat"], samples.assign(wait=waits)[samples["arm"] == full]
        known = theirs.dropna(subset="wait").drop_duplicates(by, keep="last")
        waits /= samples[by].merge(known[[*by, "wait"]], how="left", on=by)["wait"].to_numpy()
        label = f"TTFT over {full}'s"
    logs = np.log(waits.where(waits > 0))
    reused = 100 * samples["tokens_reused"].astype(float) / samples["tokens_prompt"]
    arms = list(dict.fromkeys(samples["arm"]))
    panels = {
        label: {arm: np.exp(_grouped(logs[samples["arm"] == arm])) for arm in arms},
        "tokens reused, %": {arm: _grouped(reused[samples["arm"] == arm]) for arm in arms},
    }
    shown = [name for name, lines in panels.items() if any(len(of) > 1 for of in lines.values())]
    if not shown:
        return
    with drawing():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
        grid = figure.subplots(1, len(shown), squeeze=False)[0]
        for axis, name in zip(grid, shown, strict=True):
            for place, (arm, (colour, _)) in enumerate(arm_styles(arms).items()):
                line = panels[name][arm]
                axis.plot(line, color=colour, ls=line_style(place), lw=1.4, label=arm)
            axis.set(xlabel="request", ylabel=name, xlim=0)
            axis.set_ylim(bottom=0)
        handles, names = grid[0].get_legend_handles_labels()
        columns = 4 if max(map(len, arms)) <= _SHORT else 3
        figure.legend(handles, names, fontsize=8, loc="outside upper left", ncols=columns)
        write(figure, caption, base)


def _grouped(values: "pd.Series[float]") -> "pd.Series[float]":
    """The centre of each group of neighbours, at the number of its last request.

    A group that is less than half full is left out.
    """
    known = pd.Series(values.to_numpy(), index=range(1, len(values) + 1)).dropna()
    size = max(_GROUP, -(-len(known) // _GROUPS))
    groups = np.arange(len(known)) // size
    whole = [(of.index[-1], of.mean()) for _, of in known.groupby(groups) if 2 * len(of) >= size]
    return pd.Series(dict(whole), dtype=float)
