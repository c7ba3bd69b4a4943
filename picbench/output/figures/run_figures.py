"""Figures of one run: time to the first token, memory over time, accuracy against time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from picbench.engines.ledger import KINDS
from picbench.output.figures.style import (
    WIDTH,
    arm_styles,
    drawing,
    kind_colours,
    line_style,
    log_steps,
    write,
)
from picbench.output.summary import ArmSummary

if TYPE_CHECKING:
    import pandas as pd

#: Points of a line over time; more cannot be told apart in a panel.
_POINTS = 300

#: Panels beside each other.
_COLUMNS = 3

#: Names up to so many characters fit four to a line.
_SHORT = 24

#: Of a normal distribution, for 95 %.
_DEVIATIONS = 1.96


def draw_ttft(samples: "pd.DataFrame", caption: str, base: Path) -> None:
    """The share of requests that had their first token after so many milliseconds, an arm a line.

    `samples` is `samples_frame`'s; only timed requests count, and without any nothing is drawn.
    """
    timed = samples[samples["timed"] & samples["ttft_ms"].notna()]
    if timed.empty:
        return
    with drawing():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(WIDTH, 4.0), layout="constrained")
        axis = figure.subplots()
        groups = dict(list(timed.groupby("arm", sort=False)["ttft_ms"]))
        for place, (arm, (colour, _)) in enumerate(arm_styles(list(groups)).items()):
            line = line_style(place)
            axis.ecdf(groups[arm].astype(float), color=colour, ls=line, lw=1.4, label=arm)
        _log_scale(axis)
        axis.set_xlabel("time to the first token, ms")
        axis.set_ylabel("share of requests")
        _legend(figure, list(groups))
        write(figure, caption, base)


def draw_memory(
    ledger: "pd.DataFrame", caption: str, base: Path, stalls: Mapping[str, int] | None = None
) -> None:
    """A panel an arm: blocks by kind over time, stacked, in percent of the pool.

    `ledger` is `ledger_frame`'s; without a step nothing is drawn. `stalls` says how many steps of
    an arm stalled; these are hatched.
    """
    if ledger.empty:
        return
    kinds = [kind for kind in KINDS if kind != "free"]
    colours = kind_colours()
    groups = dict(list(ledger.groupby("arm", sort=False)))
    columns = min(_COLUMNS, len(groups))
    rows = -(-len(groups) // columns)
    with drawing():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(WIDTH, 2.3 * rows + 1.0), layout="constrained")
        grid = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
        for axis, (arm, steps) in zip(grid, groups.items(), strict=False):
            shown = peaks(steps)
            axis.stackplot(
                shown["time"],
                [100 * shown[kind] / shown["pool"] for kind in kinds],
                colors=[colours[kind] for kind in kinds],
                labels=kinds,
                step="post",
            )
            for start, end in longest_steps(steps, (stalls or {}).get(arm, 0)):
                axis.axvspan(start, end, fill=False, hatch="///", lw=0, alpha=0.6)
            axis.set_title(arm, loc="left", fontsize=9)
            axis.set_xlabel("time, s")
        for axis in grid[::columns]:
            axis.set_ylabel("% of the pool")
        for axis in grid[len(groups) :]:
            axis.set_visible(False)
        handles, labels = grid[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=5, fontsize=8)
        write(figure, caption, base)


def longest_steps(steps: "pd.DataFrame", count: int) -> list[tuple[float, float]]:
    """Beginnings and ends, in seconds, of an arm's `count` longest steps with requests running."""
    took = (steps["time"].shift(-1) - steps["time"]).where(steps["referenced"] > 0)
    longest = took.nlargest(count)
    begins = steps.loc[longest.index, "time"]
    ends = begins + longest
    return [(float(begin), float(end)) for begin, end in zip(begins, ends, strict=True)]


def peaks(steps: "pd.DataFrame", points: int = _POINTS) -> "pd.DataFrame":
    """At most `points` of an arm's steps: of each stretch of time that with most in use.

    A step that is left out held no more than the one that stands for its stretch.
    """
    if len(steps) <= points:
        return steps
    stretch = -(-len(steps) // points)
    groups = [number // stretch for number in range(len(steps))]
    return steps.loc[steps.groupby(groups)["referenced"].idxmax()]


def draw_scores(
    samples: "pd.DataFrame", arms: Mapping[str, ArmSummary], caption: str, base: Path
) -> None:
    """The mean score against the median time to the first token, an arm a point.

    Bars are quartiles of times and 95 % of the mean score, as if requests were independent.
    Without scores nothing is drawn.
    """
    scored = samples[samples["error"].isna()]
    timed = scored[scored["timed"] & scored["ttft_ms"].notna()]
    if timed.empty:
        return
    times = timed.astype({"ttft_ms": float}).groupby("arm")["ttft_ms"]
    quartiles = times.quantile([0.25, 0.5, 0.75]).unstack()
    # A reply in which there is nothing to score counts as 0, as in the summary.
    scores = scored.assign(score=scored["score"].astype(float).fillna(0.0))
    spread = scores.groupby("arm")["score"].sem().fillna(0.0)
    means = {name: arm.score.mean for name, arm in arms.items() if name in quartiles.index}
    known = {name: mean for name, mean in means.items() if mean is not None}
    if not known:
        return
    with drawing():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(WIDTH, 4.4), layout="constrained")
        axis = figure.subplots()
        for name, (colour, marker) in arm_styles(list(known)).items():
            low, middle, high = quartiles.loc[name]
            reach = _DEVIATIONS * spread[name]
            axis.errorbar(
                [middle],
                [known[name]],
                xerr=[[middle - low], [high - middle]],
                yerr=[[min(reach, known[name])], [min(reach, 1 - known[name])]],
                color=colour,
                marker=marker,
                capsize=2,
                lw=1,
                label=name,
            )
        _log_scale(axis)
        axis.set_xlabel("time to the first token, ms: median and quartiles")
        axis.set_ylabel(_score_label(next(iter(arms.values()))))
        _legend(figure, list(known))
        write(figure, caption, base)


def _legend(figure: Any, arms: Sequence[str]) -> None:
    """Names above the plot, where they hide nothing; long ones in fewer columns."""
    columns = 4 if max(map(len, arms)) <= _SHORT else 3
    figure.legend(fontsize=8, loc="outside upper left", ncols=min(columns, len(arms)))


def _log_scale(axis: Any) -> None:
    """A logarithmic axis of milliseconds with plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    plain = FuncFormatter(lambda value, _: f"{value:,g}")
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=log_steps(*axis.get_xlim())))
    axis.xaxis.set_major_formatter(plain)
    axis.xaxis.set_minor_formatter("")


def _score_label(arm: ArmSummary) -> str:
    label = f"{arm.score.metric}: mean and 95 % of it"
    return label if arm.score.meaningful else f"{label} (untrained weights: not meaningful)"
