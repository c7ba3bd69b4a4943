"""Costs that are fitted to a grid, how they scatter, and predictions from them."""

from dataclasses import replace
from itertools import product
from math import inf
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.algorithms import parse
from picbench.errors import ConfigError
from picbench.profile.grid import (
    ALONE,
    BURST,
    ArmCell,
    GridFacts,
    GridPoint,
    MeasuredCell,
    MeasuredGrid,
    packaged_grids,
    read_grid,
)
from picbench.profile.predictor import (
    CellSpread,
    GridPredictor,
    Observation,
    deviations,
    fit,
    leave_one_out,
    scattered_median,
)
from picbench.profile.profile import (
    ArmProfile,
    RequestSize,
    TraceProfile,
    TrafficSums,
    serve_loop,
)
from picbench.profile.reuse import ReuseTotals

COSTS = (0.02, 0.025, 0.001, 0.0, 0.0005, 0.004)


def observed(count: int, noise: float = 0.0) -> list[Observation]:
    source = Random(4)
    found = []
    for number in range(count):
        prompt = source.uniform(500, 20_000)
        computed = prompt * source.random()
        chunks = source.randint(1, 40)
        compiled = computed * source.random()
        size = RequestSize(prompt, computed, compiled, chunks, prompt / chunks, 4)
        counts = size.prefill()
        value = sum(cost * x for cost, x in zip(COSTS, counts, strict=True))
        value *= 1 + source.gauss(0, noise)
        found.append(Observation(number, counts, value, (prompt, computed, chunks)))
    return found


def test_known_costs_are_found() -> None:
    model = fit(observed(30))
    assert model is not None
    assert model.costs == pytest.approx(COSTS, abs=1e-6)
    assert model.covers((5000, 3000, 10))
    assert not model.covers((50_000, 3000, 10))
    assert not model.covers((5000, 3000, 100))


def test_cells_that_were_disturbed_count_little() -> None:
    points = observed(40, 0.02)
    disturbed = [replace(p, value=p.value * (4 if n % 8 == 0 else 1)) for n, p in enumerate(points)]
    clean, found = fit(points), fit(disturbed)
    assert clean is not None
    assert found is not None
    for point in points:
        assert found.predict(point.counts) == pytest.approx(clean.predict(point.counts), rel=0.08)


def test_errors_of_points_that_are_left_out() -> None:
    exact, noisy = leave_one_out([observed(30)]), leave_one_out([observed(30, 0.1)])
    assert exact is not None
    assert noisy is not None
    assert exact.p90 < 1e-6
    assert 0.02 < noisy.median < 0.2
    assert noisy.points == 30
    assert "30 points" in str(noisy)


def test_too_few_points_predict_nothing_but_costs_that_nothing_pays_need_none() -> None:
    assert fit(observed(7)) is None
    assert leave_one_out([observed(8)]) is None
    assert fit([]) is None
    model = fit([replace(p, counts=(*p.counts[:4], 0.0, 0.0)) for p in observed(6)])
    assert model is not None
    assert model.costs[4:] == (0.0, 0.0)


def test_repeats_of_one_point_are_left_out_together() -> None:
    points = observed(20)
    wrong = [replace(point, group="same", value=point.value * 3) for point in points[:2]]
    found = leave_one_out([[*points, *wrong]])
    assert found is not None
    # Of 22 observations the two wrong ones make one group, which is not within 15 %.
    assert found.points == 21
    assert found.within <= 20 / 22


def test_small_requests_have_the_spread_of_small_ones() -> None:
    small = [(48.0, ratio) for ratio in np.linspace(0.5, 2.0, 100)]
    large = [(4096.0, ratio) for ratio in np.linspace(0.99, 1.01, 200)]
    found = CellSpread.of(small + large)
    assert found is not None
    assert found.around(10.0, 60) == pytest.approx((5.75, 19.25))
    low, high = found.around(10.0, 3000)
    assert 9.9 < low < 9.92
    assert 10.08 < high < 10.1


def test_nine_of_ten_new_measurements_are_in_the_range() -> None:
    random = np.random.default_rng(3)
    sizes = 10 ** random.uniform(1, 4, 600)

    def ratios() -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        # The spread falls with the size, as on a GPU.
        return np.exp(random.standard_normal(600) * 0.4 / np.log(sizes))

    found = CellSpread.of(zip(sizes, ratios(), strict=True))
    assert found is not None
    inside = 0
    for size, ratio in zip(sizes, ratios(), strict=True):
        low, high = found.around(1.0, size)
        inside += low <= ratio <= high
    assert 0.85 <= inside / 600 <= 0.95


def test_the_quickest_of_the_slow_requests_are_in_the_middle() -> None:
    """As measured: 26 requests take 15 ms and 38 take 20, give or take an eighth."""
    usual = [0.015] * 26 + [0.020] * 38
    rng = np.random.default_rng(0)
    drawn = np.array(usual) * np.exp(0.12 * rng.standard_normal((4000, len(usual))))
    measured = float(np.median(drawn, axis=1).mean())
    found = scattered_median(usual, np.full(len(usual), 0.12))
    assert found == pytest.approx(measured, rel=0.01)
    assert found < 0.95 * float(np.median(usual))


@given(
    st.lists(st.floats(1e-3, 10.0), min_size=1, max_size=40),
    st.floats(0.0, 0.5),
    st.floats(0.1, 10.0),
)
def test_it_is_between_the_extremes_and_scales(
    usual: list[float], deviation: float, factor: float
) -> None:
    scatter = np.full(len(usual), deviation)
    found = scattered_median(usual, scatter)
    assert min(usual) * (1 - 1e-5) <= found <= max(usual) * (1 + 1e-5)
    again = scattered_median([factor * time for time in usual], scatter)
    assert again == pytest.approx(factor * found, rel=1e-4)


def test_scatter_is_that_of_cells_about_as_large() -> None:
    def cells(computed: float, deviation: float) -> list[tuple[float, float]]:
        return [(computed + i, float(np.exp(1.6449 * deviation))) for i in range(20)]

    tails = CellSpread.of(cells(100.0, 0.10) + cells(3000.0, 0.02))
    found = deviations(tails, [50.0, 5000.0, 50.0, 0.0])
    assert found == pytest.approx([0.10, 0.02, 0.10, 0.10], rel=1e-3)
    # Too few cells say nothing. Of two requests the 95th percentile may be below a rounded median.
    few, quick = ([(100.0, ratio)] * cells for cells, ratio in ((19, 1.5), (20, 0.99)))
    assert not deviations(CellSpread.of(few), [100.0, 1.0]).any()
    assert not deviations(CellSpread.of(quick), [100.0]).any()
    assert scattered_median([3.0, 1.0, 2.0, 10.0], np.zeros(4)) == 2.5


RUNNING, OUTPUT = 4, 8

#: Seconds: of a request, of a thousand computed tokens; of a step, of a generated token.
REQUEST, TOKENS, STEP, REPLY = 0.004, 0.020, 0.003, 0.001

#: Tokens of the largest step that a graph serves, where there are graphs.
GRAPH = 200

#: So many times longer takes an arm that maps chunks.
LINKED = 2.0

GRID_FACTS = GridFacts("m", {}, "m", "float32", 1 << 20, 100, RUNNING, "", step_tokens=8192)


def ttft(computed: float, factor: float) -> float:
    return factor * (REQUEST + TOKENS * computed / 1e3)


def seconds(requests: int, computed: float, loop: tuple[float, float], factor: float) -> float:
    """Of the engine for a whole cell, which takes so many steps and replies."""
    steps, replies = loop
    return requests * ttft(computed, factor) + factor * (STEP * steps + REPLY * replies)


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
    took = seconds(requests, computed, (steps, replies), factor)
    measured = ArmCell(
        requests=requests,
        ttft_s=ttft(computed, factor),
        ttft_p95_s=1.0,
        requests_s=requests / took,
        peak_blocks=1.0,
        prompt=prompt,
        computed=computed,
        output=OUTPUT,
        compiled=0.0,
    )
    return point, measured


def calibration(
    slow: float, slow_linked: float, *, seeds: int = 2, load: str = "", **facts: object
) -> MeasuredGrid:
    """Cells of the fixture's grid on a machine that takes so many times as long."""
    cells = []
    for seed, each in product(range(seeds), (load,) if load else (ALONE, BURST)):
        for chunks, share in product((1, 2, 4, 7, 10), (0.3, 0.6, 1.0)):
            point, plain = cell(chunks, share, each, slow)
            _, linked = cell(chunks, share, each, LINKED * slow_linked)
            cells.append(MeasuredCell(point, seed, {"prefix": plain, "mepic": linked}))
    return MeasuredGrid(replace(GRID_FACTS, **facts), cells)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def predictor() -> GridPredictor:
    """Closed loops, and requests at a rate, which are left out."""
    cells = [*calibration(1, 1, seeds=1).cells, *calibration(1, 1, seeds=1, load="5").cells]
    return GridPredictor(MeasuredGrid(GRID_FACTS, cells))


def served(
    spec: str, computed: list[float], *, last: float | None = None
) -> tuple[TraceProfile, ArmProfile]:
    """Requests of 550 tokens in five chunks, of which so many are computed."""
    sizes = [RequestSize(550, count, 0, 5, 100, OUTPUT) for count in computed]
    loop = serve_loop(sizes, RUNNING, 8192)
    totals = ReuseTotals(requests=len(sizes))
    first = None if last is None else 0.0
    arm = ArmProfile(parse(spec), totals, None, 512, sizes, loop)
    traffic = TrafficSums(requests=len(sizes), chunks=5 * len(sizes), first=first, last=last)
    return TraceProfile("t", "plain", False, None, RUNNING, traffic, (arm,)), arm


@pytest.mark.parametrize(("spec", "factor"), [("prefix", 1.0), ("mepic", LINKED)])
def test_costs_of_the_grid_are_paid_by_the_trace(
    predictor: GridPredictor, spec: str, factor: float
) -> None:
    found = predictor.predict(*served(spec, [200.0, 300.0, 550.0, 500.0]))
    # The median computes 400 tokens. Four requests run together: eight steps, 28 further tokens.
    assert found.ttft_s == pytest.approx(factor * 0.012, rel=0.02)
    total = 4 * 0.004 + 1.55 * 0.020 + 8 * 0.003 + 28 * 0.001
    assert found.requests_s == pytest.approx(4 / (factor * total), rel=0.03)
    assert found.kv_gib == 0.5
    assert found.loaded_ttft_s is None
    assert found.inside


def test_requests_wait_in_a_queue(predictor: GridPredictor) -> None:
    """Pollaczek and Khinchine for equal service times: half of rate * s^2 / (1 - rate * s)."""
    alone = predictor.predict(*served("prefix", [400.0] * 4))
    assert alone.ttft_s is not None
    assert alone.requests_s is not None
    each = 1 / alone.requests_s
    for used in (0.5, 0.8):
        found = predictor.predict(*served("prefix", [400.0] * 4, last=3 * each / used))
        assert found.loaded_ttft_s is not None
        # Half of the time: s / 2; four fifths of it: 2 s.
        wait = {0.5: 0.5, 0.8: 2.0}[used] * each
        assert found.loaded_ttft_s == pytest.approx(alone.ttft_s + wait)
    assert predictor.predict(*served("prefix", [400.0] * 4, last=2.9 * each)).loaded_ttft_s == inf


def test_what_the_grid_does_not_have_is_outside(predictor: GridPredictor) -> None:
    assert not predictor.predict(*served("prefix", [5000.0] * 4)).inside
    assert not predictor.predict(*served("mepic", [1.0] * 4)).inside


@pytest.mark.parametrize("spec", ["prefix", "mepic"])
def test_a_prediction_says_how_far_machines_were_apart(spec: str) -> None:
    cells = []
    for load, seed in product((ALONE, BURST), range(5)):
        # Two of the five machines were slower, and the fit follows the three others.
        factor = (1.0, 1.0, 1.0, 1.2, 1.3)[seed]
        for chunks, share in product((1, 2, 4, 7, 10), (0.3, 0.6, 1.0)):
            point, found = cell(chunks, share, load, factor)
            cells.append(MeasuredCell(point, seed, {spec: found}))
    arm = served(spec, [400.0] * 4)
    found = GridPredictor(MeasuredGrid(GRID_FACTS, cells)).predict(*arm)
    assert found.ttft_s is not None
    assert found.requests_s is not None
    assert found.ttft_s_range == pytest.approx((found.ttft_s, 1.3 * found.ttft_s), rel=0.03)
    slowest = found.requests_s / 1.3
    assert found.requests_s_range == pytest.approx((slowest, found.requests_s), rel=0.03)
    # One cell at each point of a load is too few.
    few = GridPredictor(MeasuredGrid(GRID_FACTS, cells[:15])).predict(*arm)
    assert few.ttft_s is not None
    assert (few.ttft_s_range, few.requests_s_range) == (None, None)


@pytest.mark.parametrize(("requests", "jumps"), [(9, True), (10_001, False)])
def test_the_median_of_few_requests_may_be_of_the_next_size(requests: int, jumps: bool) -> None:
    predictor = GridPredictor(calibration(1.0, 1.0))
    sizes = [200.0] * (requests // 2 + 1 + requests // 20) + [600.0] * (requests // 2)
    found = predictor.predict(*served("prefix", sizes))
    small, large = (
        predictor.predict(*served("prefix", [size] * 9)).ttft_s for size in (200.0, 600.0)
    )
    assert found.ttft_s == small
    assert found.ttft_s_range == pytest.approx((small, large if jumps else small), rel=0.02)


def test_few_cells_predict_nothing_but_memory() -> None:
    point, plain = cell(2, 1.0, ALONE, 1.0)
    grid = MeasuredGrid(GRID_FACTS, [MeasuredCell(point, 0, {"prefix": plain})])
    found = GridPredictor(grid).predict(*served("prefix", [400.0] * 4, last=9.0))
    assert (found.ttft_s, found.requests_s, found.loaded_ttft_s) == (None, None, None)
    assert (found.kv_gib, found.inside) == (0.5, False)
    other = GridPredictor(grid, block_bytes=1 << 22).predict(*served("prefix", [400.0]))
    assert other.kv_gib == 2.0


@pytest.mark.parametrize(("quiet", "slow"), [((1.0, 0.5, 0.5), 1.0), ((0.5, 0.5, 0.5), 1.5)])
def test_disturbed_repeats_count_where_there_are_no_others(
    quiet: tuple[float, ...], slow: float
) -> None:
    cells = []
    for seed, share in enumerate(quiet):
        for one in calibration(1.0, 1.0, seeds=1, load=ALONE).cells:
            took = 1.0 if share == 1.0 else 1.5
            arms = {
                name: replace(arm, ttft_s=took * arm.ttft_s, quiet=share)
                for name, arm in one.arms.items()
            }
            cells.append(replace(one, seed=seed, arms=arms))
    cells += calibration(1.0, 1.0, load=BURST).cells
    found = GridPredictor(MeasuredGrid(GRID_FACTS, cells)).predict(*served("prefix", [400.0]))
    assert found.ttft_s == pytest.approx(slow * 0.012, rel=0.02)
    assert found.ttft_s_range is not None
    assert found.ttft_s_range[1] >= 1.45 * 0.012


def test_few_tokens_take_as_long_as_the_host_needs() -> None:
    def took(computed: float, compiled: float) -> float:
        host = 0.030 if compiled else 0.014
        return max(host, 0.006 + 0.018 * computed / 1e3)

    def alone(chunks: int, reuse: float) -> MeasuredCell:
        chunk_tokens, text = 250, 60.0
        compiled = chunks * chunk_tokens * (1 - reuse)
        point, measured = cell(chunks, 1 - reuse, ALONE, 1.0)
        computed = text + compiled
        arm = replace(
            measured,
            ttft_s=took(computed, compiled),
            prompt=text + chunks * chunk_tokens,
            computed=computed,
            compiled=compiled,
        )
        return MeasuredCell(
            replace(point, chunk_tokens=chunk_tokens, reuse=reuse), 0, {"mepic": arm}
        )

    cells = [alone(chunks, reuse) for chunks in (1, 2, 4, 8, 16, 32) for reuse in (0, 0.5, 1)]
    found = GridPredictor(MeasuredGrid(GRID_FACTS, cells)).errors().ttft
    assert found is not None
    assert found.median < 0.03
    assert found.within >= 0.8


def test_the_h200s_grid_predicts_itself() -> None:
    errors = GridPredictor(read_grid(packaged_grids()["h200-llama-3.1-8b"])).errors()
    assert errors.ttft is not None
    assert errors.requests_s is not None
    assert errors.ttft.median < 0.03
    assert errors.ttft.within >= 0.9
    assert errors.requests_s.within >= 0.95
    assert errors.requests_s.p90 < 0.08


def test_steps_beyond_graphs_wait_for_the_host() -> None:
    def took(point: GridPoint, computed: float) -> MeasuredCell:
        arm = replace(
            cell(4, 0.6, ALONE, 1.0)[1],
            ttft_s=0.008 + 0.010 * computed / 1e3 + 0.020 * (computed > GRAPH),
            prompt=4000.0,
            computed=computed,
        )
        return MeasuredCell(replace(point, corpus=round(computed)), 0, {"prefix": arm})

    point, _ = cell(4, 0.6, ALONE, 1.0)
    cells = [
        took(point, computed) for computed in (60, 100, 140, 180, 220, 260, 300, 340, 380, 420)
    ]
    for size, close in ((GRAPH, True), (400, False)):
        facts = replace(GRID_FACTS, graph_tokens={"prefix": size})
        found = GridPredictor(MeasuredGrid(facts, cells)).errors().ttft
        assert found is not None
        assert (found.median < 0.01) is close


def test_graphs_of_a_calibration_are_compared_with_the_grids(predictor: GridPredictor) -> None:
    assert predictor.warning is None
    same = GridPredictor(predictor.grid, calibration=calibration(1, 1))
    assert same.warning is None
    versions, sizes = {"driver": "1"}, {"prefix": 512, "mepic": 1024}
    other = calibration(1, 1, versions=versions, graph_tokens=sizes)
    said = GridPredictor(predictor.grid, calibration=other).warning
    assert said is not None
    assert said.startswith("--calibration: CUDA graphs of up to 512 (prefix) and 1,024 (mepic)")


@pytest.mark.parametrize(("spec", "slow"), [("prefix", 1.5), ("mepic", 0.5)])
def test_a_calibration_gives_the_times_of_its_machine(
    predictor: GridPredictor, spec: str, slow: float
) -> None:
    there = GridPredictor(predictor.grid, calibration=calibration(1.5, 0.5))
    trace = served(spec, [400.0] * 4, last=1e6)
    found, grids = there.predict(*trace), predictor.predict(*trace)
    assert found.ttft_s and grids.ttft_s and found.requests_s and grids.requests_s
    assert found.ttft_s == pytest.approx(slow * grids.ttft_s, rel=0.02)
    assert found.requests_s == pytest.approx(grids.requests_s / slow, rel=0.02)
    assert found.loaded_ttft_s == pytest.approx(found.ttft_s, rel=1e-3)
    assert found.kv_gib == grids.kv_gib
    assert found.ttft_s_range == pytest.approx((found.ttft_s, found.ttft_s), rel=0.02)
    assert found.requests_s_range == pytest.approx((found.requests_s,) * 2, rel=0.02)


@pytest.mark.parametrize("slow", [(1.0, 1.0), (1.5, 0.5)])
def test_cells_are_predicted_as_they_were_measured(
    predictor: GridPredictor, slow: tuple[float, float]
) -> None:
    calibrated = GridPredictor(predictor.grid, calibration=calibration(*slow))
    there = predictor if slow == (1.0, 1.0) else calibrated
    for load, (spec, factor) in product(
        (ALONE, BURST), (("prefix", slow[0]), ("mepic", LINKED * slow[1]))
    ):
        point, arm = cell(4, 0.6, load, factor)
        found = there.predict_cell(spec, point, arm)
        assert found.requests_s == pytest.approx(arm.requests_s, rel=0.03)
        assert found.ttft_s == pytest.approx(arm.ttft_s, rel=0.03)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (calibration(1, 1, model="n"), "its model is n, the grid's is m"),
        (calibration(1, 1, dtype="bfloat16"), "its dtype is bfloat16"),
        (calibration(1, 1, running=8), "its running is 8"),
        (calibration(1, 1, step_tokens=64), "its step_tokens is 64"),
        (calibration(1, 1, seeds=1), "too few cells"),
        (calibration(1, 1, load=BURST), "too few cells"),
    ],
    ids=["model", "type", "running", "steps", "few", "no requests alone"],
)
def test_a_calibration_of_something_else_is_refused(
    predictor: GridPredictor, other: MeasuredGrid, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        GridPredictor(predictor.grid, calibration=other)
    assert caught.value.hint
