"""Grids as files, which CUDA graphs their engines had, and predictions from them."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import inf
from pathlib import Path

import pytest

from picbench.engines.algorithms import parse
from picbench.engines.costs import RequestSize
from picbench.errors import ConfigError
from picbench.profile.costs import serve_loop
from picbench.profile.predictor import (
    ALONE,
    BURST,
    PACKAGED,
    SCHEMA,
    ArmCell,
    ArmPrediction,
    GridFacts,
    GridPoint,
    GridPredictor,
    MeasuredCell,
    MeasuredGrid,
    choose_grid,
    choose_predictor,
    read_grid,
    write_grid,
)

RUNNING, OUTPUT = 4, 8

#: Seconds: of a request, of a thousand computed tokens; of a step, of a generated token.
REQUEST, TOKENS, STEP, REPLY = 0.004, 0.020, 0.003, 0.001

#: Tokens of the largest step that a graph serves, where there are graphs.
GRAPH = 200

#: So many times longer takes an arm that maps chunks.
LINKED = 2.0

FACTS = GridFacts("m", {}, "m", "float32", 1 << 20, 100, RUNNING, "", step_tokens=8192)


def cell(chunks: int, share: float, load: str, factor: float) -> tuple[GridPoint, ArmCell]:
    prompt, requests = 100.0 * chunks + 50, 8
    computed = prompt * share
    point = GridPoint(
        reuse=1 - share,
        chunks=chunks,
        chunk_tokens=100,
        corpus=24,
        load=load,
        output=OUTPUT,
        cache="cold",
    )
    # Prompts fit a step: one for all that begin together, one for each further token.
    running = 1 if load == ALONE else RUNNING
    steps, replies = requests // running * OUTPUT, requests * (OUTPUT - 1)
    ttft_s = factor * (REQUEST + TOKENS * computed / 1e3)
    took = requests * ttft_s + factor * (STEP * steps + REPLY * replies)
    measured = ArmCell(
        requests=requests,
        ttft_s=ttft_s,
        ttft_p95_s=1.0,
        requests_s=requests / took,
        peak_blocks=1.0,
        prompt=prompt,
        computed=computed,
        output=OUTPUT,
        compiled=0.0,
    )
    return point, measured


def measured(
    slow: float = 1.0, linked: float = 1.0, *, seeds: int = 2, load: str = "", **facts: object
) -> MeasuredGrid:
    """A grid on a machine that takes so many times as long, for arms of either kind."""
    cells = []
    for seed, each in product(range(seeds), (load,) if load else (ALONE, BURST)):
        for chunks, share in product((1, 2, 4, 7, 10), (0.3, 0.6, 1.0)):
            point, plain = cell(chunks, share, each, slow)
            _, mapped = cell(chunks, share, each, LINKED * linked)
            cells.append(MeasuredCell(point, seed, {"prefix": plain, "mepic": mapped}))
    return MeasuredGrid(replace(FACTS, **facts), cells)  # type: ignore[arg-type]


def test_a_grid_is_read_as_it_was_written(tmp_path: Path) -> None:
    grid = measured(caveat="shared", graph_tokens={"prefix": 512, "mepic": 1024})
    write_grid(tmp_path / "deep" / "grid.json", grid)
    found = read_grid(tmp_path / "deep" / "grid.json")
    assert found == grid
    assert found.about().endswith("shared")


def test_what_is_no_grid_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "grid.json"
    for text, message in (
        ("[", "JSON"),
        ("[]", f"schema {SCHEMA}"),
        ('{"schema": 0}', f"schema {SCHEMA}"),
        (f'{{"schema": {SCHEMA}, "cells": []}}', "facts"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=rf"`grid` .*grid\.json.*{message}"):
            read_grid(path)
    with pytest.raises(ConfigError, match="`grid` nowhere") as caught:
        choose_grid("nowhere")
    assert "cpu-testbed" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="`calibration` nowhere: No such file") as caught:
        choose_predictor("cpu-testbed", "nowhere")
    assert caught.value.hint == "name a grid.json"
    with pytest.raises(ConfigError, match="there is no grid to calibrate"):
        choose_predictor("none", "nowhere")


def test_the_packages_grids_say_where_they_were_measured() -> None:
    assert choose_grid("none") is None
    assert choose_grid(None) == choose_grid("h200-llama-3.1-8b")
    for name, path in PACKAGED.items():
        grid = read_grid(path)
        assert grid.facts.hardware, name
        assert grid.facts.versions["vllm"], name
        assert len({cell.seed for cell in grid.cells}) >= 3, name
        assert grid.facts.graph_tokens, name
        graphs = grid.facts.captured(linked=True)
        assert graphs == 0 if name.startswith("cpu") else graphs >= 128, name


def graphs(stock: int, linked: int) -> GridFacts:
    sizes = dict.fromkeys(("full", "prefix"), stock) | dict.fromkeys(("mepic", "naive"), linked)
    return replace(FACTS, graph_tokens=sizes)


@pytest.mark.parametrize(
    ("stock", "linked", "said"),
    [
        (512, 1024, "CUDA graphs of up to 512 (full, prefix) and 1,024 (mepic, naive) tokens"),
        (128, 128, "CUDA graphs of up to 128 tokens"),
        (0, 0, "no CUDA graphs"),
    ],
)
def test_each_kind_of_arms_has_graphs_of_its_own(stock: int, linked: int, said: str) -> None:
    grid = graphs(stock, linked)
    assert (grid.captured(linked=False), grid.captured(linked=True)) == (stock, linked)
    assert grid.graphs() == said


@pytest.mark.parametrize(
    ("grid", "same"),
    [
        (graphs(512, 1024), True),
        (replace(FACTS, graph_tokens={"mepic": 1024}), True),
        (graphs(512, 512), False),
    ],
    ids=["same", "arms in common", "other"],
)
def test_other_graphs_are_warned_of(grid: GridFacts, same: bool) -> None:
    said = graphs(512, 1024).graph_warning(grid, "--calibration")
    assert (said is None) is same
    assert (grid.graph_warning(graphs(512, 1024), "") is None) is same
    if said:
        assert said.startswith("--calibration: CUDA graphs of up to 512 (full")
        assert "--grid: CUDA graphs" in said
        assert "\n" not in said


@pytest.fixture(scope="module")
def predictor() -> GridPredictor:
    """Closed loops, and requests at a rate, which are left out."""
    cells = [*measured(seeds=1).cells, *measured(seeds=1, load="5").cells]
    return GridPredictor(MeasuredGrid(FACTS, cells))


def predict(
    predictor: GridPredictor, spec: str, computed: Sequence[float], rate: float | None = None
) -> ArmPrediction:
    """Requests of 550 tokens in five chunks, of which so many are computed."""
    sizes = [RequestSize(550, count, 0, 5, 100, OUTPUT) for count in computed]
    return predictor.predict(parse(spec), sizes, serve_loop(sizes, RUNNING, 8192), 512, rate)


@pytest.mark.parametrize(("spec", "factor"), [("prefix", 1.0), ("mepic", LINKED)])
def test_costs_of_the_grid_are_paid_by_the_trace(
    predictor: GridPredictor, spec: str, factor: float
) -> None:
    found = predict(predictor, spec, [200.0, 300.0, 550.0, 500.0])
    # The median computes 400 tokens. Four requests run together: eight steps, 28 further tokens.
    assert found.ttft_s == pytest.approx(factor * 0.012, rel=0.02)
    total = 4 * 0.004 + 1.55 * 0.020 + 8 * 0.003 + 28 * 0.001
    assert found.requests_s == pytest.approx(4 / (factor * total), rel=0.03)
    assert found.kv_gib == 0.5
    assert found.loaded_ttft_s is None
    assert found.inside


@pytest.mark.parametrize(("used", "waits"), [(0.5, 0.5), (0.8, 2.0), (1.02, inf)])
def test_requests_wait_in_a_queue(predictor: GridPredictor, used: float, waits: float) -> None:
    """Pollaczek and Khinchine for equal service times: half of rate * s^2 / (1 - rate * s)."""
    alone = predict(predictor, "prefix", [400.0] * 4)
    assert alone.ttft_s is not None
    assert alone.requests_s is not None
    found = predict(predictor, "prefix", [400.0] * 4, used * alone.requests_s)
    assert found.loaded_ttft_s == pytest.approx(alone.ttft_s + waits / alone.requests_s)


def test_what_the_grid_does_not_have_is_outside(predictor: GridPredictor) -> None:
    assert not predict(predictor, "prefix", [5000.0] * 4).inside
    assert not predict(predictor, "mepic", [1.0] * 4).inside


@pytest.mark.parametrize("spec", ["prefix", "mepic"])
def test_a_prediction_says_how_far_machines_were_apart(spec: str) -> None:
    cells = []
    for load, seed in product((ALONE, BURST), range(5)):
        # Two of the five machines were slower, and the fit follows the three others.
        factor = (1.0, 1.0, 1.0, 1.2, 1.3)[seed]
        for chunks, share in product((1, 2, 4, 7, 10), (0.3, 0.6, 1.0)):
            point, found = cell(chunks, share, load, factor)
            cells.append(MeasuredCell(point, seed, {spec: found}))
    found = predict(GridPredictor(MeasuredGrid(FACTS, cells)), spec, [400.0] * 4)
    assert found.ttft_s is not None
    assert found.requests_s is not None
    assert found.ttft_s_range == pytest.approx((found.ttft_s, 1.3 * found.ttft_s), rel=0.03)
    slowest = found.requests_s / 1.3
    assert found.requests_s_range == pytest.approx((slowest, found.requests_s), rel=0.03)
    # One cell at each point of a load is too few.
    few = predict(GridPredictor(MeasuredGrid(FACTS, cells[:15])), spec, [400.0] * 4)
    assert few.ttft_s is not None
    assert (few.ttft_s_range, few.requests_s_range) == (None, None)


@pytest.mark.parametrize(("requests", "jumps"), [(9, True), (10_001, False)])
def test_the_median_of_few_requests_may_be_of_the_next_size(requests: int, jumps: bool) -> None:
    predictor = GridPredictor(measured())
    sizes = [200.0] * (requests // 2 + 1 + requests // 20) + [600.0] * (requests // 2)
    found = predict(predictor, "prefix", sizes)
    small, large = (predict(predictor, "prefix", [size] * 9).ttft_s for size in (200.0, 600.0))
    assert found.ttft_s == small
    assert found.ttft_s_range == pytest.approx((small, large if jumps else small), rel=0.02)


def test_few_cells_predict_nothing_but_memory() -> None:
    point, plain = cell(2, 1.0, ALONE, 1.0)
    few = GridPredictor(MeasuredGrid(FACTS, [MeasuredCell(point, 0, {"prefix": plain})]))
    found = predict(few, "prefix", [400.0] * 4, 9.0)
    assert (found.ttft_s, found.requests_s, found.loaded_ttft_s) == (None, None, None)
    assert (found.kv_gib, found.inside) == (0.5, False)


@pytest.mark.parametrize(("quiet", "slow"), [((1.0, 0.5, 0.5), 1.0), ((0.5, 0.5, 0.5), 1.5)])
def test_disturbed_repeats_count_where_there_are_no_others(
    quiet: tuple[float, ...], slow: float
) -> None:
    cells = list(measured(load=BURST).cells)
    for seed, share in enumerate(quiet):
        for one in measured(seeds=1, load=ALONE).cells:
            took = 1.0 if share == 1.0 else 1.5
            arms = {
                name: replace(arm, ttft_s=took * arm.ttft_s, quiet=share)
                for name, arm in one.arms.items()
            }
            cells.append(replace(one, seed=seed, arms=arms))
    found = predict(GridPredictor(MeasuredGrid(FACTS, cells)), "prefix", [400.0])
    assert found.ttft_s == pytest.approx(slow * 0.012, rel=0.02)
    assert found.ttft_s_range is not None
    assert found.ttft_s_range[1] >= 1.45 * 0.012


def test_few_tokens_take_as_long_as_the_host_needs() -> None:
    cells = []
    for chunks, reuse in product((1, 2, 4, 8, 16, 32), (0.0, 0.5, 1.0)):
        compiled = chunks * 250 * (1 - reuse)
        point, found = cell(chunks, 1 - reuse, ALONE, 1.0)
        arm = replace(
            found,
            ttft_s=max(0.030 if compiled else 0.014, 0.006 + 0.018 * (60 + compiled) / 1e3),
            prompt=60.0 + chunks * 250,
            computed=60 + compiled,
            compiled=compiled,
        )
        cells.append(MeasuredCell(replace(point, chunk_tokens=250), 0, {"mepic": arm}))
    errors = GridPredictor(MeasuredGrid(FACTS, cells)).errors().ttft
    assert errors is not None
    assert errors.median < 0.03
    assert errors.within >= 0.8


def test_the_h200s_grid_predicts_itself() -> None:
    errors = GridPredictor(read_grid(PACKAGED["h200-llama-3.1-8b"])).errors()
    assert errors.ttft is not None
    assert errors.requests_s is not None
    assert errors.ttft.median < 0.03
    assert errors.ttft.within >= 0.9
    assert errors.requests_s.within >= 0.95
    assert errors.requests_s.p90 < 0.08


def test_steps_beyond_graphs_wait_for_the_host() -> None:
    cells, (point, found) = [], cell(4, 0.6, ALONE, 1.0)
    for computed in range(60, 440, 40):
        seconds = 0.008 + 0.010 * computed / 1e3 + 0.020 * (computed > GRAPH)
        arm = replace(found, ttft_s=seconds, prompt=4000.0, computed=computed)
        cells.append(MeasuredCell(replace(point, corpus=computed), 0, {"prefix": arm}))
    for size, close in ((GRAPH, True), (400, False)):
        facts = replace(FACTS, graph_tokens={"prefix": size})
        errors = GridPredictor(MeasuredGrid(facts, cells)).errors().ttft
        assert errors is not None
        assert (errors.median < 0.01) is close


def test_graphs_of_a_calibration_are_compared_with_the_grids() -> None:
    grid = measured(graph_tokens={"prefix": 512, "mepic": 512})
    assert GridPredictor(grid).warning is None
    assert GridPredictor(grid, grid).warning is None
    other = measured(graph_tokens={"prefix": 512, "mepic": 1024})
    said = GridPredictor(grid, other).warning
    assert said is not None
    assert said.startswith("--calibration: CUDA graphs of up to 512 (prefix) and 1,024 (mepic)")


@pytest.mark.parametrize(("spec", "slow"), [("prefix", 1.5), ("mepic", 0.5)])
def test_a_calibration_gives_the_times_of_its_machine(
    predictor: GridPredictor, spec: str, slow: float
) -> None:
    there = GridPredictor(predictor.grid, measured(1.5, 0.5))
    found, grids = (predict(one, spec, [400.0] * 4, 1e-6) for one in (there, predictor))
    assert found.ttft_s and grids.ttft_s and found.requests_s and grids.requests_s
    assert found.ttft_s == pytest.approx(slow * grids.ttft_s, rel=0.02)
    assert found.requests_s == pytest.approx(grids.requests_s / slow, rel=0.02)
    assert found.loaded_ttft_s == pytest.approx(found.ttft_s, rel=1e-3)
    assert found.kv_gib == grids.kv_gib
    assert found.ttft_s_range == pytest.approx((found.ttft_s, found.ttft_s), rel=0.02)
    assert found.requests_s_range == pytest.approx((found.requests_s,) * 2, rel=0.02)
    # Cells are predicted as they were measured.
    kind = LINKED if spec == "mepic" else 1.0
    for one, load in product((there, predictor), (ALONE, BURST)):
        point, arm = cell(4, 0.6, load, kind * slow if one is there else kind)
        times = arm.ttft_s, arm.requests_s
        assert one.predict_cell(spec, point, arm) == pytest.approx(times, rel=0.03)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (measured(model="n"), "its model is n, the grid's is m"),
        (measured(dtype="bfloat16"), "its dtype is bfloat16"),
        (measured(running=8), "its running is 8"),
        (measured(step_tokens=64), "its step_tokens is 64"),
        (measured(seeds=1), "too few cells"),
        (measured(load=BURST), "too few cells"),
    ],
    ids=["model", "type", "running", "steps", "few", "no requests alone"],
)
def test_a_calibration_of_something_else_is_refused(
    predictor: GridPredictor, other: MeasuredGrid, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        GridPredictor(predictor.grid, other)
    assert caught.value.hint
