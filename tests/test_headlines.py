"""The figures of a GPU in docs/results.md: what was measured says them."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, NamedTuple

import pytest
from measured_code import changed_lines

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "results" / "gpu"

#: A row of the table: words, figures, a page of the folder, and how often it was measured.
ROW = re.compile(r"^\| (.+?) \| (\S.*?) \| `(\S+)\.md`, (.+) \|$", re.M)

#: Figures of code that differs from today's by more lines of the GPU path are measured again.
MOST_CHANGED = 50

Document = Mapping[str, Any]


class Headline(NamedTuple):
    """What a row must say: its page, figures, and how often these were measured."""

    page: str
    figures: str
    count: str


def read(page: str, of_run: str = "summary") -> Document:
    """What a page is about: a measurement's file, or one of a run's."""
    run = FOLDER / page
    file = run / f"{of_run}.json" if run.is_dir() else run.with_suffix(".json")
    found: Document = json.loads(file.read_bytes())
    return found


def ratios(above: Mapping[str, Sequence[float]], below: Mapping[str, Sequence[float]]) -> list[str]:
    """Ratios of medians: to the first token, for one after it, throughput."""
    names = ("ttft_ms", "tpot_ms", "tokens_per_s")
    return [f"{median(above[name]) / median(below[name]):.3f}" for name in names]


def engine_comparison() -> list[Headline]:
    page = "engine-comparison"
    document = read(page)
    stock, ours = document["found"]["stock"], document["found"]["picbench"]
    warm = median(ours["warm_ttft_ms"])
    n = f"n={document['provenance']['rounds']}"
    return [
        Headline(page, ", ".join(ratios(ours, stock)), n),
        Headline(page, f"1/{median(stock['warm_ttft_ms']) / warm:.1f}", n),
        Headline(page, f"{warm / median(stock['hit_ttft_ms']):.2f}", n),
    ]


def cold() -> list[Headline]:
    page = "load-report-cold"
    arms = read(page)["cells"]["cold"]
    ours, stock = (arms[arm]["ttft_ms"] for arm in ("mepic", "prefix"))
    ratio = geometric_mean([one / other for one, other in zip(ours, stock, strict=True)])
    return [Headline(page, f"{ratio:.2f}", f"n={len(ours)}")]


def decode_load() -> list[Headline]:
    page, found = "decode-load", []
    arms = read(page)["cells"]["load"]
    ours = arms["auto"]["tokens_s"]
    for arm in ("prefix", "common"):
        pairs = zip(ours, arms[arm]["tokens_s"], strict=True)
        ratio = geometric_mean([one / other for one, other in pairs])
        found.append(Headline(page, f"{ratio:.3g}", f"n={len(ours)}"))
    return found


def kernels() -> list[Headline]:
    page = "kernels"
    document = read(page)
    results = document["results"]
    n = f"{document['provenance']['rounds']} rounds a case"
    speeds = [
        row["speed_vs_fa3"]["turned"]["median"]
        for row in results
        if row["kind"] == "decode" and row["requests"] >= 16
    ]
    times = [row["time_vs_fa3"]["median"] for row in results if row["kind"] == "link"]
    return [Headline(page, f"{median(each):.2f}", n) for each in (speeds, times)]


def default_flags() -> list[Headline]:
    page = "default-flags"
    full, ours = (read(page)["arms"][arm] for arm in ("full", "mepic"))
    figures = (ours["ttft_vs_full"]["geomean"], ours["tpot_ms"] / full["tpot_ms"])
    return [
        Headline(page, ", ".join(f"{each:.2f}" for each in figures), f"n={ours['requests']}"),
    ]


HEADLINES = [
    *(*engine_comparison(), *cold(), *decode_load(), *kernels(), *default_flags()),
]


def rows() -> list[tuple[str, Headline]]:
    """The words of each row of the table, and what it says."""
    page = (ROOT / "docs" / "results.md").read_text()
    section = page.split("\n## On a GPU\n")[1].split("\n## ")[0]
    table = re.search(r"(?:^\|.*\n)+", section, re.M)
    assert table
    lines = table[0].splitlines()[2:]
    found = [match for line in lines if (match := ROW.match(line))]
    assert len(found) == len(lines), "a row names no page of results/gpu"
    return [(words, Headline(page, figures, n)) for words, figures, page, n in map(groups, found)]


def groups(match: re.Match[str]) -> tuple[str, str, str, str]:
    words, figures, page, count = match.groups()
    return words, figures, page, count


def test_rows_say_what_was_measured() -> None:
    assert [said for _, said in rows()] == HEADLINES


@pytest.mark.parametrize("page", sorted({each.page for each in HEADLINES}))
def test_figures_are_of_code_like_todays(page: str) -> None:
    of_run = (FOLDER / page).is_dir()
    changed = changed_lines(FOLDER, read(page, "manifest" if of_run else "summary")["provenance"])
    assert changed is not None, "no record of the code that was measured"
    assert changed <= MOST_CHANGED, f"{changed} lines of the GPU path changed since: measure again"
