"""The KV pool over time: blocks by kind, a plot an arm."""

from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from picbench.engines.config import BLOCK_SIZE
from picbench.engines.ledger import IDLE, KINDS
from picbench.output.run_reader import HELD, Series
from picbench.report.markup import element
from picbench.report.plot import Axis, HtmlFigure, LegendEntry, Plot, path
from picbench.report.run_contents import RunContents

#: Steps that are drawn of an arm at most.
COLUMNS = 160

#: From the bottom: what requests hold, then what is idle.
STACKED = (*HELD, *(kind for kind in reversed(IDLE) if kind != "free"))


def memory_figure(contents: RunContents) -> HtmlFigure | None:
    """Blocks with KV in them by kind; None where the run has no block ledger."""
    ledger = {name: series for name, series in contents.ledger.items() if len(series.time)}
    if not ledger:
        return None
    highest = max(float(series.resident.max()) for series in ledger.values()) or 1.0
    seen = [k for k in STACKED if any(series.blocks[k].any() for series in ledger.values())]
    plots = [(name, _plot(name, series, highest, seen)) for name, series in ledger.items()]
    pools = ", ".join(f"{pool:,}" for pool in sorted({s.pool for s in ledger.values()}))
    caption = (
        f"Blocks of {BLOCK_SIZE} tokens, out of a pool of {pools}, on each arm's own "
        "clock, which stops while other arms compute; all plots have one scale. The free "
        "rest is not drawn."
    )
    if any(len(series.time) > COLUMNS for series in ledger.values()):
        caption += f" Of the steps, at most {COLUMNS} are drawn: the fullest of each interval."
    legend = [_entry(kind) for kind in reversed(seen)]
    return HtmlFigure("KV blocks over time", plots, legend, caption, contents.labels)


def columns(series: Series, count: int = COLUMNS) -> tuple[list[float], dict[str, list[float]]]:
    """Times and blocks by kind of `count` steps at most: of each interval its fullest step.

    Blocks of one step stay together, so that they still sum to the pool, and the peak stays.
    """
    steps = len(series.time)
    if steps <= count:
        chosen = np.arange(steps)
    else:
        edges = np.linspace(series.time[0], series.time[-1], count + 1)[1:-1]
        bins = np.searchsorted(edges, series.time, side="right")
        order = np.lexsort((-series.referenced, bins))
        chosen = order[np.unique(bins[order], return_index=True)[1]]
    return series.time[chosen].tolist(), {k: series.blocks[k][chosen].tolist() for k in KINDS}


def _plot(name: str, series: Series, highest: float, kinds: Sequence[str]) -> Markup:
    times, blocks = columns(series)
    end = max(float(series.time[-1]), times[0] + 1e-3)
    plot = Plot(
        Axis("seconds", times[0], end),
        Axis("blocks", 0, 1.04 * highest),
        f"Blocks over time of {name}",
    )
    base = [0.0] * len(times)
    areas = []
    for kind in kinds:
        top = [low + more for low, more in zip(base, blocks[kind], strict=True)]
        outline = [*_steps(plot, times, top, end), *reversed(_steps(plot, times, base, end))]
        shape = path(outline) + "Z"
        areas.append(element("path", element("title", kind), d=shape, class_=f"k-{kind}"))
        base = top
    return plot.draw(*areas)


def _steps(
    plot: Plot, times: Sequence[float], values: Sequence[float], end: float
) -> list[tuple[float, float]]:
    """A value holds until the next one begins."""
    ends = [*times[1:], end]
    return [
        plot.at(time, value)
        for begin, until, value in zip(times, ends, values, strict=True)
        for time in (begin, until)
    ]


def _entry(kind: str) -> LegendEntry:
    box = element("rect", width=12, height=12, class_=f"k-{kind}")
    mark = element("svg", box, viewBox="0 0 12 12", width="12", height="12", aria_hidden="true")
    return LegendEntry(mark, kind.replace("_", " "))
