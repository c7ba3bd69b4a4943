"""The grid of break-even: what is planned, resumed, compared and shown."""

import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from picbench.errors import IncomparableRuns
from picbench.experiments import grid as measuring
from picbench.experiments.break_even import crossing, find_ratios, write_page
from picbench.experiments.grid import GridProgress, estimate_grid
from picbench.experiments.grid_plan import ARMS, GRIDS, GridTraffic, plan_grid
from picbench.figures.canvas import FORMATS
from picbench.profile.grid import (
    ALONE,
    BURST,
    ArmCell,
    GridFacts,
    GridPoint,
    MeasuredCell,
    MeasuredGrid,
    read_grid,
)

FACTS = GridFacts("a machine", {"vllm": "1", "commit": "a"}, "m", "float32", 1024, 100, 4, "")
SETTINGS = GRIDS["cpu"]


def cell(ttft: float, requests_s: float = 1.0, blocks: float = 10.0) -> ArmCell:
    return ArmCell(
        requests=4,
        ttft_s=ttft,
        ttft_p95_s=ttft,
        requests_s=requests_s,
        peak_blocks=blocks,
        prompt=500,
        computed=100,
        output=4,
    )


def measured(count: int | None = None) -> MeasuredGrid:
    """A grid in which mepic is better from half of the tokens on."""
    cells = []
    for traffic in plan_grid(SETTINGS)[:count]:
        for point in traffic.points:
            mepic = 1.5 - point.reuse + traffic.seed / 1000
            arms = {arm: cell(1.0) for arm in ARMS} | {"mepic": cell(mepic, 1 / mepic, 5.0)}
            cells.append(MeasuredCell(point, traffic.seed, arms, 2.0))
    return MeasuredGrid(FACTS, cells)


def run(output: Path) -> measuring.GridRun:
    return measuring.GridRun(
        model="testbed", device="cpu", dtype="float32", seconds=0, output=output
    )


def test_what_is_measured_is_not_measured_again(tmp_path: Path) -> None:
    total = len(plan_grid(SETTINGS))
    nothing, some = (estimated(g) for g in (None, measured(10)))
    assert (nothing.done, nothing.total) == (0, total)
    assert some.done == 10
    assert some.tokens < nothing.tokens
    assert nothing.seconds > 0
    # Each of the ten took four seconds, whatever they were expected to take.
    assert some.seconds == pytest.approx(4.0 * (total - 10), rel=0.6)
    assert estimated(measured()).seconds == 0
    assert f"10 of {total} traffics" in str(some)
    for progress in (nothing, some):
        assert sum(share.left for share in progress.stages) == total - progress.done
        assert sum(s.seconds for s in progress.stages) == pytest.approx(progress.seconds)
    assert "1. each traffic once: 10 of 24 measured" in str(some)


def estimated(grid: MeasuredGrid | None) -> GridProgress:
    return estimate_grid(plan_grid(SETTINGS), SETTINGS, "cpu", grid)


def test_parts_of_a_grid_write_one_file(tmp_path: Path) -> None:
    parts = [plan_grid(SETTINGS, (number, 2)) for number in (1, 2)]
    assert sorted(map(repr, parts[0] + parts[1])) == sorted(map(repr, plan_grid(SETTINGS)))
    path = tmp_path / "grid.json"
    cells = measured(4).cells
    measuring.add_cells(path, FACTS, cells[:4])
    both = measuring.add_cells(path, FACTS, cells[2:])
    assert both.cells == cells
    assert len(read_grid(path).cells) == len(cells)


def test_cells_of_another_machine_are_not_joined(tmp_path: Path) -> None:
    grid = measured(1)
    with pytest.raises(IncomparableRuns, match="hardware"):
        measuring._joined(grid, replace(FACTS, hardware="another"), tmp_path)
    graphs = replace(FACTS, graph_tokens={"mepic": 1024}, versions={"driver": "1"})
    with pytest.raises(IncomparableRuns, match="measured with no CUDA graphs, here are CUDA"):
        measuring._joined(replace(grid, facts=replace(FACTS, versions={})), graphs, tmp_path)
    with pytest.raises(IncomparableRuns, match="vllm 1"):
        measuring._joined(grid, replace(FACTS, versions={"vllm": "2", "commit": "a"}), tmp_path)


def test_a_grid_names_each_commit_that_it_was_measured_at(tmp_path: Path) -> None:
    path = tmp_path / "grid.json"
    first, second, *_ = measured(1).cells
    added = (("a", [first]), ("b", [second]), ("b", [second]), ("a", [first]), ("c", []))
    for commit, cells in added:
        facts = replace(FACTS, versions={"vllm": "1", "commit": commit})
        measuring.add_cells(path, facts, cells)
    grid = read_grid(path)
    assert grid.cells == [first, second]
    assert grid.facts.versions == {"vllm": "1", "commit": "a, b"}


def disturbed(cells: Sequence[MeasuredCell], quiet: float) -> list[MeasuredCell]:
    """The cells as they are when so many of mepic's requests begin on a quiet core."""
    return [
        replace(one, arms={**one.arms, "mepic": replace(one.arms["mepic"], quiet=quiet)})
        for one in cells
    ]


def test_of_a_cell_the_one_that_was_disturbed_less_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "grid.json"
    order = sorted(measured(12).cells, key=lambda one: one.point.load)
    first, second = order[0], order[-1]
    assert (first.point.load, second.point.load) == (ALONE, BURST)
    for quiet, kept in ((0.5, 0.5), (0.25, 0.5), (0.75, 0.75), (0.75, 0.75), (1.0, 1.0)):
        grid = measuring.add_cells(path, FACTS, disturbed((first, second), quiet))
        assert [one.quiet for one in grid.cells] == [kept, kept]
        assert [one.disturbed for one in grid.cells] == [kept < 0.9, False]
    assert not first.disturbed


def test_what_was_disturbed_is_measured_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, served = run(tmp_path), list[GridTraffic]()
    all_cells = measured().cells
    planned = plan_grid(SETTINGS)
    left = [next(t for t in planned if t.point.load == BURST and t.seed == s) for s in (0, 1)]
    again = [t for t in planned if t.point.load == ALONE and not t.seed][:3]
    cells = [one for one in all_cells if (one.point, one.seed) not in keys(left)]
    busy = keys(again)
    cells = [disturbed((one,), 0.5 if (one.point, one.seed) in busy else 1.0)[0] for one in cells]
    measuring.add_cells(wanted.path, FACTS, cells)

    def measure(traffic: GridTraffic, *_: object) -> list[MeasuredCell]:
        served.append(traffic)
        own = [one for one in all_cells if (one.point, one.seed) in keys([traffic])]
        return disturbed(own, 0.5 if traffic == again[0] else 1.0)

    monkeypatch.setattr(measuring, "open_engines", lambda *_: nullcontext((None, {})))
    monkeypatch.setattr(measuring, "grid_facts", lambda *_: FACTS)
    monkeypatch.setattr(measuring, "_measure", measure)
    done = measuring.measure_grid(wanted, lambda _: None)
    assert served == [left[0], *again, left[1]]
    assert done.done == done.total
    still = {(one.point, one.seed) for one in read_grid(wanted.path).cells if one.disturbed}
    assert still == keys(again[:1])
    # Nothing is left, so nothing is started for it.
    monkeypatch.delattr(measuring, "open_engines")
    measuring.measure_grid(wanted, lambda _: None)


def keys(traffics: Sequence[GridTraffic]) -> set[tuple[GridPoint, int]]:
    return {(point, traffic.seed) for traffic in traffics for point in traffic.points}


def test_where_arms_cross() -> None:
    assert crossing({0.0: 2.0, 0.5: 1.5, 1.0: 0.5}) == pytest.approx(0.75)
    assert crossing({0.0: 0.9, 1.0: 0.5}) == 0
    assert crossing({0.0: 0.9, 1.0: 1.5}) is None
    # Better once by chance, then worse again: only the last crossing counts.
    assert crossing({0.0: 0.9, 0.5: 1.5, 1.0: 0.5}) == pytest.approx(0.75)


def test_the_page_names_crossings_and_losses(tmp_path: Path) -> None:
    versions = {"vllm": "1", "commit": "0123456" + 33 * "a" + "-dirty"}
    grid = replace(measured(), facts=replace(FACTS, versions=versions))
    page = write_page(grid, tmp_path, ["a note"])
    assert (tmp_path / "README.md").read_text() == page
    ratios = find_ratios(grid)
    lost = [ratio for ratio in ratios if ratio.middle > 1]
    assert f"{len(lost)} of {len(ratios)} comparisons" in page
    assert all(ratio.point.reuse <= 0.5 for ratio in lost)
    assert {ratio.quantity.name for ratio in lost} == {"ttft", "throughput"}
    assert page.count("| 50% |") >= 2
    assert "a note" in page
    assert "with repeats: all with 3 seeds. Engines: no CUDA graphs." in page
    linked = re.findall(r"\]\((.+)\.svg\)", page)
    assert len(linked) == 6
    assert all((tmp_path / f"{name}.{kind}").exists() for name in linked for kind in FORMATS)
    caption = (tmp_path / "ttft-cold.svg").read_text()
    assert "commit 0123456-dirty" in caption
    assert "alone, cold cache, corpus of 24 chunks, replies of 4 tokens; median, n=3" in caption
    fewer = replace(grid, cells=[cell for cell in grid.cells if cell.seed < 2][:-2])
    page = write_page(fewer, tmp_path)
    assert ": 2 with 1 seed, 46 with 2 seeds." in page
    assert "Where no chunk recurs" not in page
    assert "nothing else used" not in page
    quiet = replace(grid, cells=[*disturbed(grid.cells[:-1], 0.75), grid.cells[-1]])
    assert "75% of the requests alone began on a core that nothing else used; of " in write_page(
        quiet, tmp_path
    )


def test_prefix_stands_for_reorder_where_it_was_not_served(tmp_path: Path) -> None:
    whole = measured()
    cells = [
        replace(cell, arms={a: c for a, c in cell.arms.items() if a != "reorder"})
        if not cell.point.reuse
        else cell
        for cell in whole.cells
    ]
    grid = replace(whole, cells=cells)
    assert find_ratios(grid) == find_ratios(whole)
    assert "Where no chunk recurs `reorder` sends what `prefix` does" in write_page(grid, tmp_path)
