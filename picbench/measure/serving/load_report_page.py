"""The page of loads, and the summary's figures of them."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

from picbench.measure.load_settings import PREFIX, SUBJECT
from picbench.measure.report import spread, update_summary
from picbench.measure.serving.decode_load_page import ratio
from picbench.measure.serving.rounds_file import CellFigures, RoundsFound
from picbench.output import markdown
from picbench.statistics.paired import paired_ratio
from picbench.whole_files import write_whole

#: Of mixed traffic, the arm whose prompts' chunks are new.
NEW = "mepic, new chunks"

#: A rate counts as served where so much of it was: the last requests end after the last arrival.
_SERVED = 0.9

_LOAD: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        "requests_s": ("requests/s", 2),
        "ttft_ms": ("TTFT p50, ms", 0),
        "ttft_p95_ms": ("p95, ms", 0),
        "tpot_ms": ("TPOT, ms", 1),
        "referenced": ("referenced, blocks", 0),
        "resident": ("resident, blocks", 0),
    }
)
_MIXED: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        "itl_p99_ms": ("between tokens, p99, ms", 1),
        "itl_ms": ("median, ms", 2),
        "itl_most_ms": ("most, ms", 1),
        "itl_alone_ms": ("median without prompts, ms", 2),
    }
)
_COLD: Mapping[str, tuple[str, int]] = MappingProxyType({"ttft_ms": ("TTFT, ms", 0)})

#: Groups of cells: title, what is said, and columns, of which the first is compared.
GROUPS: Mapping[str, tuple[str, str, Mapping[str, tuple[str, int]]]] = MappingProxyType(
    {
        "share-nothing": (
            "Nothing is shared",
            "Each chunk is in one request only; by tokens of a chunk, ten in a request.",
            _LOAD,
        ),
        "2wiki": (
            "2WikiMQA-like requests, more than any arm can serve",
            "The load of `picbench measure load`, from an empty cache.",
            _LOAD,
        ),
        "mixed": (
            "Plain requests beside long prompts",
            "Plain requests decode while long prompts of chunks arrive; chunks are in the pool of "
            f"`{SUBJECT}`, and new otherwise.",
            _MIXED,
        ),
        "cold": (
            "Nothing is cached",
            "A long prompt of new chunks, one request at a time.",
            _COLD,
        ),
        "closed": (
            "Closed loop",
            "By distinct chunks, which were all served before, and requests in flight.",
            _LOAD,
        ),
        "rate": (
            "Rates",
            "Poisson arrivals a second; chunks were all served before.",
            _LOAD,
        ),
    }
)


def write_report(found: RoundsFound, output: Path) -> str:
    """Write ``load-report.md`` and the summary's figures; the page."""
    page = render_report(found)
    write_whole(output / "load-report.md", page.encode())
    update_summary(output, report_figures(found))
    return page


def report_figures(found: RoundsFound) -> dict[str, Any]:
    """The figures for ``summary.json`` of the groups that are measured.

    Requests a second and their ratios to stock vLLM's are medians over rounds, `spread` is the
    range of MEPIC's over their median.
    """
    figures: dict[str, Any] = {}
    shared = {
        f"chunk_{cell.rpartition(' ')[2]}": _median_ratio(found.cells[cell])
        for cell in _cells(found, "share-nothing")
    }
    if shared:
        figures["share_nothing"] = shared
    if "2wiki" in found.cells:
        ours, theirs = (found.cells["2wiki"][arm]["requests_s"] for arm in (SUBJECT, PREFIX))
        figures["load"] = {
            "mepic_rps": median(ours),
            "prefix_rps": median(theirs),
            "spread": (max(ours) - min(ours)) / median(ours),
        }
    if SUBJECT in found.compiled:
        figures["jit_after_ready"] = len(found.compiled[SUBJECT])
    return figures


def _median_ratio(arms: CellFigures) -> float:
    """Requests a second of MEPIC's engine over stock vLLM's, round by round."""
    rounds = zip(arms[SUBJECT]["requests_s"], arms[PREFIX]["requests_s"], strict=True)
    return median(ours / theirs for ours, theirs in rounds)


def render_report(found: RoundsFound) -> str:
    """The page, in Markdown."""
    facts = found.facts
    kernels = ", ".join(f"{arm}: {len(names)}" for arm, names in found.compiled.items())
    lines = [
        "# Loads, each arm with a server of its own",
        "",
        f"{facts['model']}, {facts['dtype']}: times, not answers; {facts['gpu']}, driver "
        f"{facts['driver']}, vLLM {facts['vllm']}, torch {facts['torch']}, commit "
        f"{facts['commit']}. `{SUBJECT}` is an engine of picbench (shared decode: "
        f"{facts['shared_decode']}), `{PREFIX}` stock vLLM with "
        f"prefix caching; both are up at once with pools of {facts['pool']:,} blocks of "
        f"{facts['block_tokens']} tokens, at most {facts['running']} requests at a time and the "
        "token budget that they have by default, and take turns, another one first in each round. "
        f"Median (lowest - highest). Over {PREFIX}: geometric mean of rounds (95 %). Kernels "
        f"compiled after engines were ready: {kernels}.",
        "",
    ]
    for group, (title, text, columns) in GROUPS.items():
        cells = _cells(found, group)
        if cells:
            lines += [f"## {title}", "", text, "", _table(found, cells, columns), ""]
    if cells := _cells(found, "rate"):
        knees = (f"{arm} {_knee(found, cells, arm)}" for arm in (SUBJECT, PREFIX))
        lines += [
            f"Highest rate of which {_SERVED:.0%} is served, requests/s: {', '.join(knees)}.",
            "",
        ]
    for cell, error in found.failures.items():
        lines += [f"{cell} failed: {error.splitlines()[0]}", ""]
    return "\n".join(lines)


def _table(found: RoundsFound, cells: Sequence[str], columns: Mapping[str, tuple[str, int]]) -> str:
    key = next(iter(columns))
    rows = [row for cell in cells for row in _rows(cell, found.cells[cell], columns)]
    head = ("", "n", "arm", *(name for name, _ in columns.values()), f"{columns[key][0]}, over")
    return markdown.table(head, rows, right=3)


def _rows(
    cell: str, figures: CellFigures, columns: Mapping[str, tuple[str, int]]
) -> Iterator[tuple[str, ...]]:
    key = next(iter(columns))
    for arm, values in figures.items():
        alone = arm == PREFIX or PREFIX not in figures
        over = "-" if alone else ratio(values[key], figures[PREFIX][key])
        yield (
            cell,
            str(len(values[key])),
            arm,
            *(spread(values[name], digits) for name, (_, digits) in columns.items()),
            over,
        )


def _knee(found: RoundsFound, cells: Sequence[str], arm: str) -> str:
    """The highest rate that an arm serves; at least that where no higher one was measured."""
    rates = {float(cell.removeprefix("rate ")): found.cells[cell] for cell in cells}
    own = {rate: arms[arm] for rate, arms in rates.items() if arm in arms}
    served = [r for r, cell in own.items() if median(cell["requests_s"]) >= _SERVED * r]
    if not served:
        return f"below {min(rates):g}"
    return f"{'at least ' if max(served) == max(own) else ''}{max(served):g}"


def _cells(found: RoundsFound, group: str) -> list[str]:
    """The measured cells of a group, by the numbers in their names."""
    cells = [cell for cell in found.cells if cell.split(" ")[0] == group]
    return sorted(cells, key=lambda cell: [float(w) for w in cell.split() if w.isdigit()])


def _ratio(figures: CellFigures, key: str) -> Any:
    return paired_ratio(figures[PREFIX][key], figures[SUBJECT][key])
