"""Steps of a simulated scheduler, costs that are fitted to times, and how these scatter."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.costs import RequestSize
from picbench.profile.costs import (
    CellSpread,
    ClosedLoop,
    Observation,
    fit,
    leave_one_out,
    scattered_median,
    serve_loop,
)
from picbench.profile.reuse import RequestReuse


def size(computed: float = 100, output: float = 4, prompt: float = 100) -> RequestSize:
    return RequestSize(prompt, computed, 0, 0, 0, output)


@pytest.mark.parametrize(
    ("sizes", "running", "budget", "steps", "replies"),
    [
        ([size(), size()], 1, 2048, 8, 6),
        # 250 tokens take three steps, in the last of which the next request begins.
        ([size(250, 1), size(250, 1)], 2, 100, 5, 0),
        # The short request ends after its second step; the third one runs beside the long one.
        ([size(output=10), size(output=2), size(output=8)], 2, 2048, 10, 9 + 1 + 7),
    ],
    ids=["one at a time", "a budget", "a slot is filled"],
)
def test_steps_and_replies_are_counted(
    sizes: list[RequestSize], running: int, budget: int, steps: int, replies: int
) -> None:
    found = serve_loop(sizes, running, budget)
    assert (found.requests, found.steps, found.replies) == (len(sizes), steps, replies)
    assert found.prefill[1] == pytest.approx(sum(one.computed for one in sizes) / 1e3)
    if running == 1:
        assert found.read == pytest.approx(2 * (101 + 102 + 103) / 1e3)


@pytest.mark.parametrize(
    ("computed", "steps", "started", "beyond"),
    # 2 x 200 tokens are one step, which a graph serves; one of 2 x 400 is beyond 500 tokens, and of
    # no graph; of 2 x 1,300 one step has 2,048 tokens and the other 552.
    [
        (200, 1, 0, (0.0, 0.0)),
        (400, 1, 1, (0.3, 0.0)),
        (1300, 2, 2, (1.548 + 0.052, 1.048)),
    ],
)
def test_steps_of_prompts_are_counted(
    computed: float, steps: float, started: float, beyond: tuple[float, ...]
) -> None:
    found = serve_loop([size(computed), size(computed)], 2, 2048, 512)
    assert found.prefill_steps == steps
    assert found.started == started
    assert found.beyond == pytest.approx(beyond)
    assert serve_loop([size(computed), size(computed)], 2, 2048).started == 0
    assert found.steps > steps


@pytest.mark.parametrize(("output", "peak"), [(1, 20), (1 + 16, 22)])
def test_blocks_of_requests_that_run_together(output: int, peak: int) -> None:
    loop = ClosedLoop(2, 2048)
    for number in range(4):
        own = 6 + (output > 1)
        reuse = RequestReuse(100, 0, own_blocks=own, shared=((b"chunk", 8),))
        loop.push(size(output=output), reuse)
        assert loop.counts.requests == number + 1
    loop.close()
    assert loop.peak_blocks == peak
    assert loop.counts.requests == 4


def test_compiles_hold_blocks_until_their_step_has_ended() -> None:
    loop = ClosedLoop(1, 2048)
    loop.push(size(), RequestReuse(100, 0, 100, own_blocks=5, compile_blocks=3))
    loop.push(size(), RequestReuse(100, 0, own_blocks=6))
    loop.close()
    assert loop.peak_blocks == 8


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


def alike(computed: float, deviation: float) -> list[tuple[float, float]]:
    """Cells whose 95th percentiles are so many deviations above their medians."""
    return [(computed + i, float(np.exp(1.6449 * deviation))) for i in range(20)]


def test_the_quickest_of_the_slow_requests_are_in_the_middle() -> None:
    """As measured: 26 requests take 15 ms and 38 take 20, give or take an eighth."""
    usual = [0.015] * 26 + [0.020] * 38
    rng = np.random.default_rng(0)
    drawn = np.array(usual) * np.exp(0.12 * rng.standard_normal((4000, len(usual))))
    measured = float(np.median(drawn, axis=1).mean())
    found = scattered_median(usual, [100.0] * 64, CellSpread.of(alike(100.0, 0.12)))
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
    tails, computed = CellSpread.of(alike(100.0, deviation)), [100.0] * len(usual)
    found = scattered_median(usual, computed, tails)
    assert min(usual) * (1 - 1e-5) <= found <= max(usual) * (1 + 1e-5)
    again = scattered_median([factor * time for time in usual], computed, tails)
    assert again == pytest.approx(factor * found, rel=1e-4)


def test_scatter_is_that_of_cells_about_as_large() -> None:
    usual = [1.0, 1.0, 2.0]
    tails = CellSpread.of(alike(100.0, 0.10) + alike(3000.0, 0.02))
    for computed, deviation in ((50.0, 0.10), (5000.0, 0.02)):
        only = CellSpread.of(alike(computed, deviation))
        sizes = [computed] * 3
        assert scattered_median(usual, sizes, tails) == pytest.approx(
            scattered_median(usual, sizes, only), rel=1e-4
        )
    # Too few cells say nothing. Of two requests the 95th percentile may be below a rounded median.
    assert CellSpread.of([(100.0, 1.5)] * 19) is None
    for quick in (CellSpread.of([(100.0, 0.99)] * 20), None):
        assert scattered_median([3.0, 1.0, 2.0, 10.0], [100.0] * 4, quick) == 2.5
