"""The grid of break-even: what is left, resumed, compared and shown."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from local_servers import LocalLauncher

from picbench.errors import IncomparableRuns
from picbench.experiments import break_even as measuring
from picbench.experiments.break_even import (
    RIVALS,
    Choosing,
    ServedTraffic,
    crossing,
    find_chosen,
    find_ratios,
    render_page,
    stage_errors,
    write_page,
)
from picbench.experiments.grid import (
    ARMS,
    AUTO,
    GridEngines,
    GridSettings,
    GridStage,
    GridTraffic,
    plan_grid,
    read_grids,
)
from picbench.figures.canvas import FORMATS
from picbench.profile.predictor import (
    ALONE,
    BURST,
    ArmCell,
    GridFacts,
    GridPoint,
    MeasuredCell,
    MeasuredGrid,
    read_grid,
    write_grid,
)
from picbench.run.measurements import BreakEven

FACTS = GridFacts(
    *("a machine", {"vllm": "1", "commit": "a"}, "m", "float32", 1024, 100, 4, ""),
    graph_tokens={"mepic": 0},
)
SETTINGS = read_grids()["cpu"]


def cell(point: GridPoint, factor: float = 1.0, blocks: float = 10.0) -> ArmCell:
    """Longer prompts take longer."""
    seconds = factor * (0.01 + (point.prompt + 48.0) / 1e3)
    return ArmCell(
        requests=4,
        ttft_s=seconds,
        ttft_p95_s=seconds,
        requests_s=1 / seconds,
        peak_blocks=blocks,
        prompt=point.prompt + 48.0,
        computed=point.prompt + 48.0,
        output=4,
    )


def measured(
    count: int | None = None, settings: GridSettings = SETTINGS, later: float = 0.0
) -> MeasuredGrid:
    """A grid in which mepic is better from half of the tokens on; `later` seeds: that earlier."""
    cells = []
    for traffic in plan_grid(settings)[:count]:
        for point, seed in traffic.keys:
            mepic = 1.5 - point.reuse + seed / 1000 - (later if seed else 0.0)
            arms = {arm: cell(point) for arm in ARMS} | {"mepic": cell(point, mepic, 5.0)}
            cells.append(MeasuredCell(point, seed, arms, 2.0))
    return MeasuredGrid(FACTS, cells)


def wanted(output: Path, **others: Any) -> BreakEven:
    return BreakEven(device="cpu", output=output, **others)


def left(output: Path, grid: MeasuredGrid | None = None) -> tuple[int, ...]:
    """Cells that are measured beside this grid, all of them, and seconds that the rest takes."""
    if grid is not None:
        write_grid(output / "grid.json", grid)
    said = measuring.measure(wanted(output, dry_run=True)).page
    return tuple(int(number) for number in re.findall(r"\d+", said.replace(",", "")))


def test_what_is_measured_is_not_measured_again(tmp_path: Path) -> None:
    total = len(plan_grid(SETTINGS))
    done, cells, seconds = left(tmp_path)
    assert (done, cells) == (0, total)
    assert seconds > 0
    done, _, seconds = left(tmp_path, measured(10))
    assert done == 10
    # Each of the ten took four seconds, whatever they were expected to take.
    assert seconds == pytest.approx(4.0 * (total - 10), rel=0.6)
    assert left(tmp_path, measured()) == (total, total, 0)


def test_cells_of_another_machine_are_not_joined(tmp_path: Path) -> None:
    path, cells = tmp_path / "grid.json", measured(1).cells
    measuring.add_cells(path, FACTS, cells)
    with pytest.raises(IncomparableRuns, match="hardware"):
        measuring.add_cells(path, replace(FACTS, hardware="another"), cells)
    graphs = replace(FACTS, graph_tokens={"mepic": 1024})
    with pytest.raises(IncomparableRuns, match="measured with no CUDA graphs, here are CUDA"):
        measuring.add_cells(path, graphs, cells)
    with pytest.raises(IncomparableRuns, match="vllm 1"):
        measuring.add_cells(path, replace(FACTS, versions={"vllm": "2", "commit": "a"}), cells)


def test_parts_of_a_grid_write_one_file_with_all_their_commits(tmp_path: Path) -> None:
    path = tmp_path / "grid.json"
    first, second, *_ = measured(1).cells
    added = (("a", [first]), ("b", [second]), ("b", [second, first]), ("c", []))
    for commit, cells in added:
        facts = replace(FACTS, versions={"vllm": "1", "commit": commit})
        found = measuring.add_cells(path, facts, cells)
    assert found == read_grid(path)
    assert found.cells == [first, second]
    assert found.facts.versions == {"vllm": "1", "commit": "a, b"}


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
    served, all_cells, planned = list[GridTraffic](), measured().cells, plan_grid(SETTINGS)
    new = [next(t for t in planned if t.point.load == BURST and t.seed == s) for s in (0, 1)]
    again = [t for t in planned if t.point.load == ALONE and not t.seed][:3]
    cells = [one for one in all_cells if one.key not in keys(new)]
    busy = keys(again)
    cells = [disturbed((one,), 0.5 if one.key in busy else 1.0)[0] for one in cells]
    measuring.add_cells(tmp_path / "grid.json", FACTS, cells)

    def serve(cell: ServedTraffic, *_: object) -> dict[str, dict[str, ArmCell]]:
        served.append(cell.traffic)
        own = [one for one in all_cells if one.key in keys([cell.traffic])]
        found = disturbed(own, 0.5 if cell.traffic == again[0] else 1.0)
        return {arm: {one.point.cache: one.arms[arm] for one in found} for arm in ARMS}

    monkeypatch.setattr(GridEngines, "facts", lambda *_: FACTS)
    monkeypatch.setattr(measuring, "write_page", lambda *_: "")
    monkeypatch.setattr(ServedTraffic, "serve", serve)
    launcher = LocalLauncher()
    assert measuring.measure(wanted(tmp_path), launcher).code == 0
    assert served == [new[0], *again, new[1]]
    kept = read_grid(tmp_path / "grid.json")
    assert len(kept.cells) == 2 * len(planned)
    assert {one.key for one in kept.cells if one.disturbed} == keys(again[:1])
    # Nothing is left, so nothing is started for it.
    assert len(launcher.servers) == 1
    measuring.measure(wanted(tmp_path), launcher)
    assert len(launcher.servers) == 1


def test_a_grid_that_is_not_done_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measuring.add_cells(tmp_path / "grid.json", FACTS, measured(12).cells)
    monkeypatch.setattr(GridEngines, "facts", lambda *_: FACTS)
    monkeypatch.setattr(measuring, "draw_ratios", lambda *_: None)
    done = measuring.measure(wanted(tmp_path, seconds=1e-9), LocalLauncher())
    assert done.code == 4
    assert measuring.measure(wanted(tmp_path, page=True)).code == 0
    assert "## How well it interpolates" in (tmp_path / "README.md").read_text()


def keys(traffics: Sequence[GridTraffic]) -> set[tuple[GridPoint, int]]:
    return set[tuple[GridPoint, int]]().union(*(traffic.keys for traffic in traffics))


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
    assert not (tmp_path / "summary.json").exists()
    ratios = find_ratios(grid)
    lost = [ratio for ratio in ratios if ratio.middle > 1]
    assert f"{len(lost)} of {len(ratios)} comparisons" in page
    assert all(ratio.point.reuse <= 0.5 for ratio in lost)
    assert {ratio.quantity.name for ratio in lost} == {"ttft", "throughput"}
    assert page.count("| 50% |") >= 2
    assert "a note" in page
    linked = re.findall(r"\]\((.+)\.svg\)", page)
    assert len(linked) == 6
    assert all((tmp_path / f"{name}.{kind}").exists() for name in linked for kind in FORMATS)
    caption = (tmp_path / "ttft-cold.svg").read_text()
    assert "commit 0123456-dirty" in caption
    assert "alone, cold cache, corpus of 24 chunks, replies of 4 tokens; median, n=3" in caption
    quiet = replace(grid, cells=disturbed(grid.cells, 0.75)[:-2])
    page = rendered(quiet)
    assert ": 2 with 2 seeds, 46 with 3 seeds. Engines: no CUDA graphs." in page
    assert "75% of the requests alone began on a core that nothing else used." in page


def rendered(grid: MeasuredGrid) -> str:
    return render_page(grid, find_ratios(grid), "", ())


def test_prefix_stands_for_reorder_where_it_was_not_served() -> None:
    whole = measured()
    cells = [
        replace(cell, arms={a: c for a, c in cell.arms.items() if a != "reorder"})
        if not cell.point.reuse
        else cell
        for cell in whole.cells
    ]
    grid = replace(whole, cells=cells)
    assert find_ratios(grid) == find_ratios(whole)
    assert "Where no chunk recurs `reorder` sends what `prefix` does" in rendered(grid)


def chosen(grid: MeasuredGrid, factor: float) -> MeasuredGrid:
    """A grid with `auto`, which takes so many times as long as the better of its rivals."""
    cells = []
    for cell in grid.cells:
        rivals = [cell.arms[arm] for arm in RIVALS if arm in cell.arms]
        ttft, rate = min(arm.ttft_s for arm in rivals), max(arm.requests_s for arm in rivals)
        auto = replace(cell.arms["mepic"], ttft_s=factor * ttft, requests_s=rate / factor)
        cells.append(replace(cell, arms={**cell.arms, AUTO: auto}))
    return replace(grid, cells=cells)


def test_what_auto_lost_and_kept_is_said(tmp_path: Path) -> None:
    grid = measured()
    times = find_chosen(chosen(grid, 1.05))
    found = Choosing.of(times)
    write_page(chosen(grid, 1.05), tmp_path)
    assert json.loads((tmp_path / "summary.json").read_bytes()) == {"auto": asdict(found)}
    assert found.cells == len(times) == len(grid.points())
    assert found.lost_over_3_percent == len(times) and found.worst == pytest.approx(1.05)
    assert found.kept_of_gain < 0
    assert all(one.ratios == pytest.approx([1.05] * 3) for one in times)
    page = rendered(chosen(grid, 1.05))
    assert f"More than 3 % slower in {len(times)} of {len(times)} cells, 1.05 at most." in page
    assert Choosing.of(find_chosen(chosen(grid, 1.0))).kept_of_gain == pytest.approx(0)
    gains = [1 - one.mepic for one in times if one.mepic < 1]
    half = Choosing.of([replace(one, auto=(1 + one.mepic) / 2) for one in times])
    assert gains and half.kept_of_gain == pytest.approx(0.5)
    assert f"`{AUTO}`" not in rendered(grid)


#: A grid of two stages: prompts alone are served again before anything else is.
STAGED = replace(SETTINGS, again_tokens=10_000)


@pytest.mark.parametrize(
    ("settings", "stages"),
    [
        (STAGED, (GridStage.ONCE, GridStage.SMALL, GridStage.AGAIN)),
        (SETTINGS, (GridStage.ONCE, GridStage.AGAIN)),
    ],
    ids=["small prompts first", "seed by seed"],
)
def test_each_stage_is_held_against_the_whole(
    settings: GridSettings, stages: tuple[GridStage, ...]
) -> None:
    grid = measured(settings=settings, later=0.25)
    rows = [line.split(" | ") for line in stage_errors(grid, settings).splitlines()[2:]]
    assert tuple(row[0].removeprefix("| ") for row in rows) == stages
    counts = [int(row[1].split(" of ")[0]) for row in rows]
    assert [row[1] for row in rows] == [f"{count} of {count}" for count in counts]
    assert counts == sorted(counts)
    assert counts[-1] == len(grid.cells)
    half = replace(grid, cells=grid.cells[: counts[0] // 2])
    assert f"| {GridStage.ONCE} | {counts[0] // 2} of {counts[0]} |" in stage_errors(half, settings)
    assert [row[2] for row in rows] == [f"{2 * count:,}" for count in counts]
    assert "90 % within 25 points of the whole grid's" in rows[0][-1]
    assert "90 % within 0 points of the whole grid's" in rows[-1][-1]
