"""Figures of one run: time to the first token, memory over time, accuracy against time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd

from picbench.engines.ledger import KINDS
from picbench.figures.canvas import (
    WIDTH,
    arm_styles,
    drawing,
    kind_colours,
    line_style,
    log_numbers,
    write,
)
from picbench.files import FULL_DISK, write_whole
from picbench.store.reader import Run, read_run
from picbench.store.summary import BASELINE, ArmSummary
from picbench.tables.run import (
    as_csv,
    as_markdown,
    caption,
    figure_labels,
    ledger_frame,
    samples_frame,
)

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


def draw_ttft(samples: pd.DataFrame, caption: str, base: Path) -> None:
    """The share of requests that had their first token after so many milliseconds, an arm a line.

    `samples` is `samples_frame`'s; only timed requests count, and without any nothing is drawn.
    """
    timed = samples[samples["timed"] & samples["ttft_ms"].notna()]
    if timed.empty:
        return
    with drawing(WIDTH, 4.0) as figure:
        axis = figure.subplots()
        groups = dict(list(timed.groupby("arm", sort=False)["ttft_ms"]))
        for place, (arm, (colour, _)) in enumerate(arm_styles(list(groups)).items()):
            line = line_style(place)
            axis.ecdf(groups[arm].astype(float), color=colour, ls=line, lw=1.4, label=arm)
        axis.set_xscale("log")
        log_numbers(axis.xaxis)
        axis.set_xlabel("time to the first token, ms")
        axis.set_ylabel("share of requests")
        _legend(figure, list(groups))
        write(figure, caption, base)


def draw_memory(
    ledger: pd.DataFrame, caption: str, base: Path, stalls: Mapping[str, int] | None = None
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
    with drawing(WIDTH, 2.3 * rows + 1.0) as figure:
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


def longest_steps(steps: pd.DataFrame, count: int) -> list[tuple[float, float]]:
    """Beginnings and ends, in seconds, of an arm's `count` longest steps with requests running."""
    took = (steps["time"].shift(-1) - steps["time"]).where(steps["referenced"] > 0)
    longest = took.nlargest(count)
    begins = steps.loc[longest.index, "time"]
    ends = begins + longest
    return [(float(begin), float(end)) for begin, end in zip(begins, ends, strict=True)]


def peaks(steps: pd.DataFrame, points: int = _POINTS) -> pd.DataFrame:
    """At most `points` of an arm's steps: of each stretch of time that with most in use.

    A step that is left out held no more than the one that stands for its stretch.
    """
    if len(steps) <= points:
        return steps
    stretch = -(-len(steps) // points)
    groups = [number // stretch for number in range(len(steps))]
    return steps.loc[steps.groupby(groups)["referenced"].idxmax()]


def draw_scores(
    samples: pd.DataFrame, arms: Mapping[str, ArmSummary], caption: str, base: Path
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
    with drawing(WIDTH, 4.4) as figure:
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
        axis.set_xscale("log")
        log_numbers(axis.xaxis)
        axis.set_xlabel("time to the first token, ms: median and quartiles")
        axis.set_ylabel(_score_label(next(iter(arms.values()))))
        _legend(figure, list(known))
        write(figure, caption, base)


def draw_trend(samples: pd.DataFrame, caption: str, base: Path, full: str | None = None) -> None:
    """TTFT over that of the arm `full`, or TTFT itself, and reuse, over the requests of each arm.

    `samples` is `samples_frame`'s. Points are geometric means (TTFT) and means (reuse) of groups of
    neighbours; a panel without two of an arm is left out, and without any nothing is drawn.
    """
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
    with drawing(WIDTH, 3.2) as figure:
        for axis, name in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
            for place, (arm, (colour, _)) in enumerate(arm_styles(arms).items()):
                line = panels[name][arm]
                axis.plot(line, color=colour, ls=line_style(place), lw=1.4, label=arm)
            axis.set(xlabel="request", ylabel=name, xlim=0)
            axis.set_ylim(bottom=0)
        handles, labels = axis.get_legend_handles_labels()
        _legend(figure, arms, handles=handles, labels=labels)
        write(figure, caption, base)


def _grouped(values: "pd.Series[float]") -> "pd.Series[float]":
    """The centre of each group of neighbours, at the number of its last request.

    A group that is less than half full is left out.
    """
    known = pd.Series(values.to_numpy(), index=range(1, len(values) + 1)).dropna()
    size = max(_GROUP, -(-len(known) // _GROUPS))
    groups = known.groupby(np.arange(len(known)) // size)
    whole = {of.index[-1]: of.mean() for _, of in groups if 2 * len(of) >= size}
    return pd.Series(whole, dtype=float)


def _legend(figure: Any, arms: Sequence[str], **entries: Any) -> None:
    """Names above the plot, where they hide nothing; long ones in fewer columns."""
    columns = 4 if max(map(len, arms)) <= _SHORT else 3
    place = {"loc": "outside upper left", "ncols": min(columns, len(arms))}
    figure.legend(fontsize=8, **place, **entries)


def _score_label(arm: ArmSummary) -> str:
    label = f"{arm.score.metric}: mean and 95 % of it"
    return label if arm.score.meaningful else f"{label} (untrained weights: not meaningful)"


def write_run_files(path: Path) -> Iterator[str]:
    """Write a table and figures of the run in `path`, from its records alone.

    Yields a line for each that could not be made: the run is complete without any of them. Raises
    OSError for a disk that is full: with room, the same command makes them all.
    """
    found = _RunFrames(read_run(path), path)
    for name, make in _WRITERS.items():
        try:
            make(found)
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
    _WRITERS[name](_RunFrames(run, folder))


class _RunFrames:
    """A run, and the frame of its samples, which three figures need; files go into `folder`."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.run, self._folder = run, folder
        self.caption = caption(run)
        self.labels = figure_labels(run.summary)

    @cached_property
    def samples(self) -> pd.DataFrame:
        return self.labelled(samples_frame(self.run))

    @property
    def arms(self) -> Mapping[str, ArmSummary]:
        """Summaries by the labels of arms in figures."""
        return {self.labels[name]: arm for name, arm in self.run.summary.items()}

    def labelled(self, frame: pd.DataFrame) -> pd.DataFrame:
        return frame.assign(arm=frame["arm"].replace(self.labels))

    def file(self, name: str) -> Path:
        return self._folder / name


def _table(found: _RunFrames) -> None:
    write_whole(found.file("table.csv"), as_csv([found.run]).encode())
    write_whole(found.file("table.md"), as_markdown([found.run]).encode())


def _ttft(found: _RunFrames) -> None:
    draw_ttft(found.samples, found.caption, found.file("ttft"))


def _memory(found: _RunFrames) -> None:
    stalls = {arm: summary.stalls.steps for arm, summary in found.arms.items() if summary.stalls}
    ledger = found.labelled(ledger_frame(found.run))
    draw_memory(ledger, found.caption, found.file("memory"), stalls)


def _scores(found: _RunFrames) -> None:
    draw_scores(found.samples, found.arms, found.caption, found.file("accuracy"))


def _trend(found: _RunFrames) -> None:
    draw_trend(found.samples, found.caption, found.file("trend"), found.labels.get(BASELINE))


_WRITERS: Mapping[str, Callable[[_RunFrames], None]] = MappingProxyType(
    {"table": _table, "ttft": _ttft, "memory": _memory, "accuracy": _scores, "trend": _trend}
)
