"""Figures of one run: time to the first token, memory over time, accuracy against time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from picbench.engines.ledger import KINDS
from picbench.figures import canvas
from picbench.files import FULL_DISK, write_whole
from picbench.store.reader import Run, read_run
from picbench.store.summary import BASELINE
from picbench.tables import run as tables

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Points of a line over time; more cannot be told apart in a panel.
_POINTS = 300

#: Groups of neighbouring requests on a line, and requests in one at least.
_GROUPS, _GROUP = 20, 5

#: Panels beside each other.
_COLUMNS = 3

#: Names up to so many characters fit four to a line.
_SHORT = 24

#: Of a normal distribution, for 95 %.
_DEVIATIONS = 1.96


def write_run_files(path: Path) -> Iterator[str]:
    """Write a table and figures of the run in `path`, from its records alone.

    Yields a line for each that could not be made: the run is complete without any of them. Raises
    OSError for a disk that is full: with room, the same command makes them all.
    """
    run = read_run(path)
    for name in ("table", *_DRAWN):
        try:
            if name == "table":
                write_whole(path / "table.csv", tables.as_csv([run]).encode())
                write_whole(path / "table.md", tables.as_markdown([run]).encode())
            else:
                draw_run(run, name, path)
        # Whatever a drawing library raises: what was measured is safe, and must be said to be.
        except Exception as error:
            if isinstance(error, OSError) and error.errno in FULL_DISK:
                raise
            reason = (str(error).strip() or repr(error)).splitlines()[0]
            yield f"{name} was not made: {type(error).__name__}: {reason}"


def draw_run(run: Run, name: str, folder: Path) -> None:
    """Draw one figure of a run into a folder: ``ttft``, ``memory``, ``accuracy`` or ``trend``.

    A figure that would be empty is not drawn. Raises ConfigError for a file that is missing.
    """
    _DRAWN[name](run, folder / name)


def _ttft(run: Run, base: Path) -> None:
    """The share of requests that had their first token after so many ms, an arm a line."""
    samples = _labelled(run, tables.samples_frame(run))
    timed = samples[samples["timed"] & samples["ttft_ms"].notna()]
    if timed.empty:
        return
    groups = dict(list(timed.groupby("arm", sort=False)["ttft_ms"]))
    with _plot(run, list(groups), 4.0, base) as figure:
        axis = figure.subplots()
        for place, (arm, (colour, _)) in enumerate(canvas.arm_styles(groups).items()):
            line = canvas.line_style(place)
            axis.ecdf(groups[arm].astype(float), color=colour, ls=line, lw=1.4, label=arm)
        _over_time(axis, "time to the first token, ms", "share of requests")


def _memory(run: Run, base: Path) -> None:
    """A panel an arm: blocks by kind over time, in percent of the pool; stalled steps hatched."""
    ledger = _labelled(run, run.ledger)
    if ledger.empty:
        return
    labels = tables.figure_labels(run.summary)
    stalls = {labels[name]: arm.stalls.steps for name, arm in run.summary.items() if arm.stalls}
    kinds = [kind for kind in KINDS if kind != "free"]
    colours = canvas.kind_colours()
    groups = dict(list(ledger.groupby("arm", sort=False)))
    columns = min(_COLUMNS, len(groups))
    rows = -(-len(groups) // columns)
    with canvas.drawing(height=2.3 * rows + 1.0) as figure:
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
            for start, end in longest_steps(steps, stalls.get(arm, 0)):
                axis.axvspan(start, end, fill=False, hatch="///", lw=0, alpha=0.6)
            axis.set_title(arm, loc="left", fontsize=9)
            axis.set_xlabel("time, s")
        for axis in grid[::columns]:
            axis.set_ylabel("% of the pool")
        for axis in grid[len(groups) :]:
            axis.set_visible(False)
        handles, names = grid[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper center", ncols=5, fontsize=8)
        canvas.write(figure, tables.caption(run), base)


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


def _scores(run: Run, base: Path) -> None:
    """The mean score against the median time to the first token, an arm a point.

    Bars are quartiles of times and 95 % of the mean score, as if requests were independent.
    """
    samples = _labelled(run, tables.samples_frame(run))
    scored = samples[samples["error"].isna()]
    timed = scored[scored["timed"] & scored["ttft_ms"].notna()]
    if timed.empty:
        return
    times = timed.astype({"ttft_ms": float}).groupby("arm")["ttft_ms"]
    quartiles = times.quantile([0.25, 0.5, 0.75]).unstack()
    # A reply in which there is nothing to score counts as 0, as in the summary.
    scores = scored.assign(score=scored["score"].astype(float).fillna(0.0))
    spread = scores.groupby("arm")["score"].sem().fillna(0.0)
    labels = tables.figure_labels(run.summary)
    known = {
        labels[name]: arm.score.mean
        for name, arm in run.summary.items()
        if labels[name] in quartiles.index and arm.score.mean is not None
    }
    if not known:
        return
    with _plot(run, list(known), 4.4, base) as figure:
        axis = figure.subplots()
        for arm, (colour, marker) in canvas.arm_styles(known).items():
            low, middle, high = quartiles.loc[arm]
            reach, mean = _DEVIATIONS * spread[arm], known[arm]
            axis.errorbar(
                [middle],
                [mean],
                xerr=[[middle - low], [high - middle]],
                yerr=[[min(reach, mean)], [min(reach, 1 - mean)]],
                color=colour,
                marker=marker,
                capsize=2,
                lw=1,
                label=arm,
            )
        score = next(iter(run.summary.values())).score
        weights = "" if score.meaningful else " (untrained weights: not meaningful)"
        label = f"{score.metric}: mean and 95 % of it{weights}"
        _over_time(axis, "time to the first token, ms: median and quartiles", label)


def _trend(run: Run, base: Path) -> None:
    """TTFT over that of `full`, or TTFT itself, and reuse, over the requests of each arm.

    Points are geometric means (TTFT) and means (reuse) of groups of neighbours; a panel without two
    of an arm is left out.
    """
    samples = _labelled(run, tables.samples_frame(run))
    full = tables.figure_labels(run.summary).get(BASELINE)
    waits = samples["ttft_ms"].astype(float).where(samples["timed"].astype(bool))
    label = "TTFT, ms"
    if full in samples["arm"].to_numpy():
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
    with _plot(run, arms, 3.2, base) as figure:
        for axis, name in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
            for place, (arm, (colour, _)) in enumerate(canvas.arm_styles(arms).items()):
                line = canvas.line_style(place)
                axis.plot(panels[name][arm], color=colour, ls=line, lw=1.4, label=arm)
            axis.set(xlabel="request", ylabel=name, xlim=0)
            axis.set_ylim(bottom=0)


def _grouped(values: "pd.Series[float]") -> "pd.Series[float]":
    """The centre of each group of neighbours, at the number of its last request.

    A group that is less than half full is left out.
    """
    import pandas as pd

    known = pd.Series(values.to_numpy(), index=range(1, len(values) + 1)).dropna()
    size = max(_GROUP, -(-len(known) // _GROUPS))
    groups = known.groupby(np.arange(len(known)) // size)
    whole = {of.index[-1]: of.mean() for _, of in groups if 2 * len(of) >= size}
    return pd.Series(whole, dtype=float)


def _labelled(run: Run, frame: "pd.DataFrame") -> "pd.DataFrame":
    return frame.assign(arm=frame["arm"].replace(tables.figure_labels(run.summary)))


@contextmanager
def _plot(run: Run, arms: Sequence[str], height: float, base: Path) -> Iterator["Figure"]:
    """A figure with the names of arms above the plot, where they hide nothing."""
    with canvas.drawing(height=height) as figure:
        yield figure
        handles, names = figure.axes[-1].get_legend_handles_labels()
        columns = min(4 if max(map(len, arms)) <= _SHORT else 3, len(arms))
        figure.legend(handles, names, loc="outside upper left", ncols=columns, fontsize=8)
        canvas.write(figure, tables.caption(run), base)


def _over_time(axis: "Axes", x_label: str, y_label: str) -> None:
    axis.set_xscale("log")
    canvas.log_numbers(axis.xaxis)
    axis.set(xlabel=x_label, ylabel=y_label)


_DRAWN = {"ttft": _ttft, "memory": _memory, "accuracy": _scores, "trend": _trend}
