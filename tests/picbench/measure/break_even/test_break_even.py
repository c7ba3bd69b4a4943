"""The grid of break-even: what is planned, resumed, compared and shown."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from picbench.engines.config import BLOCK_SIZE
from picbench.errors import IncomparableRuns
from picbench.grid.measured_grid import (
    ALONE,
    BURST,
    ArmCell,
    GridFacts,
    MeasuredCell,
    MeasuredGrid,
    read_grid,
)
from picbench.measure.break_even import measure_grid as measuring
from picbench.measure.break_even.break_even_page import write_page
from picbench.measure.break_even.break_even_ratios import crossing, find_ratios
from picbench.measure.break_even.grid_estimate import GridProgress, estimate_grid
from picbench.measure.break_even.grid_plan import ARMS, GRIDS, IDS, draw_traffic, plan_grid
from picbench.measure.break_even.serve_cells import make_work
from picbench.output.figures.paper_canvas import FORMATS
from picbench.workloads.traffic.corpus import from_tokens

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


@pytest.mark.parametrize("device", GRIDS)
def test_any_part_of_a_grid_is_even(device: str) -> None:
    settings = GRIDS[device]
    planned = plan_grid(settings)
    assert len(set(planned)) == len(planned)
    assert settings.seeds >= 3
    assert [traffic.seed for traffic in planned] == sorted(traffic.seed for traffic in planned)
    first = planned[: len(planned) // settings.seeds]
    assert {traffic.point.reuse for traffic in first} == set(settings.reuse)
    assert {traffic.point.load for traffic in first} >= {ALONE, BURST}
    quarter = first[: len(first) // 4]
    assert len({traffic.point.reuse for traffic in quarter}) > 1


def test_traffic_has_the_reuse_that_the_cell_says() -> None:
    planned = [t for t in plan_grid(SETTINGS) if t.point.reuse == 0.5 and t.point.load == BURST]
    requests = draw_traffic(planned[0], SETTINGS)
    cold, warm = requests.cold, requests.warm
    assert len(cold) == len(warm) == SETTINGS.burst
    assert {len(sample.chunks) for sample in cold} == {planned[0].point.chunks}
    point = planned[0].point
    corpus = from_tokens(
        IDS, planned[0].seed, pool=point.corpus, chunk_tokens=point.chunk_tokens, max_tokens=1
    )
    known = {chunk.tokens for topic in corpus.topics for chunk in topic.chunks}
    chunks = [chunk for sample in (*cold, *warm) for chunk in sample.chunks]
    assert sum(chunk.tokens in known for chunk in chunks) / len(chunks) == pytest.approx(
        0.5, abs=0.1
    )


@pytest.mark.parametrize("device", GRIDS)
def test_a_warm_cache_has_what_its_requests_have_in_common(device: str) -> None:
    settings = GRIDS[device]
    for traffic in plan_grid(settings)[:40]:
        requests = draw_traffic(traffic, settings)
        filled = [chunk for sample in requests.fill for chunk in sample.chunks]
        assert len(filled) == len(set(filled)) == len(requests.fill)
        assert all(sample.max_tokens == 1 for sample in requests.fill)
        asked = [chunk for sample in requests.warm for chunk in sample.chunks]
        known = sum(chunk in set(filled) for chunk in asked) / len(asked)
        held = settings.pool * BLOCK_SIZE / (traffic.point.corpus * traffic.point.chunk_tokens)
        assert known == pytest.approx(traffic.point.reuse * min(1.0, held), abs=0.13), traffic
        if traffic.point.reuse == 0:
            assert not filled


def test_stock_engines_serve_full_with_a_tenant_each() -> None:
    requests = draw_traffic(plan_grid(SETTINGS)[0], SETTINGS)
    full = make_work("full", requests, 1, stock=True)
    salts = [request.salt for batch in full.batches for request in batch.requests]
    assert len(set(salts)) == len(salts) == len(requests.cold) + len(requests.warm)
    assert {r.algorithm for batch in full.batches for r in batch.requests} == {None}
    ours = make_work("reorder", requests, 1, stock=False)
    assert {r.algorithm for batch in ours.batches for r in batch.requests} == {"prefix"}


def test_the_cache_is_filled_between_what_is_measured() -> None:
    requests = draw_traffic(next(t for t in plan_grid(SETTINGS) if t.point.reuse), SETTINGS)
    for arm in ("prefix", "reorder", "mepic"):
        cold, fill, warm = make_work(arm, requests, 1, stock=False).batches
        assert cold.measured and warm.measured and not fill.measured
        assert len(fill.requests) == len(requests.fill) > 0


def test_each_batch_has_arrivals_of_its_own() -> None:
    requests = draw_traffic(plan_grid(SETTINGS)[0], SETTINGS)
    times = tuple(float(number) for number in range(2 * len(requests.cold)))
    cold, fill, warm = make_work("mepic", replace(requests, arrivals=times), 1, stock=False).batches
    assert cold.arrivals == warm.arrivals == times[: len(requests.cold)]
    assert fill.arrivals is None


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


def test_what_takes_the_same_at_every_reuse_is_served_once() -> None:
    points = {traffic.point for traffic in plan_grid(GRIDS["cuda"])}
    full = {p.reuse for p in points if "full" in GRIDS["cuda"].arms_at(p)}
    assert full == {0.0}
    for point in points:
        assert {"prefix", "reorder", "mepic"} <= set(GRIDS["cuda"].arms_at(point))
    long = next(p for p in points if p.chunks * p.chunk_tokens > 10_000 and p.load == BURST)
    short = next(p for p in points if p.chunks * p.chunk_tokens < 300 and p.load == BURST)
    assert GRIDS["cuda"].requests(long) < GRIDS["cuda"].requests(short)


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
    linked = re.findall(r"\]\((.+)\.png\)", page)
    assert len(linked) == 6
    assert all((tmp_path / f"{name}.{kind}").exists() for name in linked for kind in FORMATS)
    caption = (tmp_path / "ttft-cold.svg").read_text()
    assert "commit 0123456-dirty" in caption
    assert "alone, cold cache, corpus of 24 chunks, replies of 4 tokens; median, n=3" in caption
