"""Quantiles over requests and repeats: what their intervals cover, and what they are of one."""

from random import Random

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats  # type: ignore[import-untyped]

from picbench.compare.intervals import Quantile, quantile, repeated_quantile

Times = npt.NDArray[np.float64]

TIMES = st.lists(st.floats(1, 1e4), min_size=12, max_size=40)


def found_in(times: Times, q: float) -> Quantile:
    """The quantile of times [repeats, rows]."""
    repeats, rows = np.indices(times.shape)
    return repeated_quantile(
        times.ravel().tolist(), q, rows.ravel().tolist(), repeats.ravel().tolist()
    )


def lognormal(
    rng: np.random.Generator, repeats: int, rows: int, sizes: tuple[float, float, float]
) -> Times:
    """Times around 1 ms, of which repeats, rows and single requests differ by `sizes`."""
    state = sizes[0] * rng.normal(size=(repeats, 1))
    return np.exp(  # type: ignore[no-any-return]
        state + sizes[1] * rng.normal(size=rows) + sizes[2] * rng.normal(size=(repeats, rows))
    )


@pytest.mark.parametrize(
    ("q", "repeats", "rows", "sizes"),
    [
        (0.5, 2, 60, (0.10, 0.1, 0.05)),
        (0.5, 3, 100, (0.05, 0.4, 0.05)),
        (0.5, 3, 100, (0.10, 0.1, 0.05)),
        (0.5, 5, 100, (0.10, 0.4, 0.10)),
        (0.9, 5, 100, (0.10, 0.4, 0.10)),
        (0.95, 3, 200, (0.10, 0.4, 0.10)),
        (0.99, 3, 400, (0.05, 0.4, 0.05)),
    ],
)
def test_intervals_cover_the_truth_where_repeats_and_rows_differ(
    q: float, repeats: int, rows: int, sizes: tuple[float, float, float]
) -> None:
    """At least 95 % of 400, less three standard errors; as if all were independent, a lot less."""
    rng = np.random.default_rng(rows * repeats)
    truth = float(np.exp(stats.norm.ppf(q) * np.hypot.reduce(sizes)))
    hits = naive = 0
    for _ in range(400):
        times = lognormal(rng, repeats, rows, sizes)
        interval = found_in(times, q).interval
        assert interval is not None
        hits += truth in interval
        alone = quantile(times.ravel().tolist(), q).interval
        assert alone is not None
        naive += truth in alone
    assert hits / 400 >= 0.917
    assert naive / 400 <= 0.80


def test_ten_repeats_of_the_same_rows_know_little_more_than_one() -> None:
    """Rows differ and repeats do not: what other rows would take is as open as before."""
    rng = np.random.default_rng(3)
    once, ten = (found_in(lognormal(rng, n, 200, (0, 0.4, 0.05)), 0.5).interval for n in (1, 10))
    assert once is not None
    assert ten is not None
    assert ten.half_width == pytest.approx(once.half_width, rel=0.25)


def test_repeats_that_find_other_machines_widen_the_interval() -> None:
    """Three repeats at 90, 100 and 110: Student's t of two degrees, 4.30, over sqrt(3)."""
    rows = np.exp(np.random.default_rng(1).normal(0, 1e-4, 100))
    found = found_in(np.outer([90.0, 100.0, 110.0], rows), 0.5)
    reach = 4.3027 * np.log([90, 100, 110]).std(ddof=1) / np.sqrt(3)
    assert found.repeats == 3
    assert found.interval is not None
    assert np.log(100 / found.interval.low) == pytest.approx(reach, rel=0.01)
    assert np.log(found.interval.high / 100) == pytest.approx(reach, rel=0.01)


@given(TIMES)
def test_one_repeat_is_as_before(times: list[float]) -> None:
    assert found_in(np.array([times]), 0.5) == quantile(times, 0.5)


@given(TIMES, st.integers(2, 5))
def test_copies_of_the_same_requests_add_nothing(times: list[float], copies: int) -> None:
    once = quantile(times, 0.5).interval
    again = found_in(np.array([times] * copies), 0.5).interval
    assert once is not None
    assert again is not None
    assert (again.low, again.high) == pytest.approx((once.low, once.high))


@given(TIMES, TIMES, st.sampled_from([0.5, 2.0, 1000.0]))
def test_another_unit_scales_the_interval(
    first: list[float], second: list[float], scale: float
) -> None:
    size = min(len(first), len(second))
    times = np.array([first[:size], second[:size]])
    one, other = found_in(times, 0.5).interval, found_in(scale * times, 0.5).interval
    assert one is not None
    assert other is not None
    assert (other.low, other.high) == pytest.approx((scale * one.low, scale * one.high))


@given(TIMES, TIMES, st.randoms())
def test_order_does_not_matter_and_the_median_is_inside(
    first: list[float], second: list[float], random: Random
) -> None:
    """Repeats need not have the same requests: the second lacks some, or has more."""
    requests = [
        (time, row, repeat)
        for repeat, times in enumerate((first, second))
        for row, time in enumerate(times)
    ]
    shuffled = random.sample(requests, len(requests))
    one, other = (
        repeated_quantile(t, 0.5, r, n) for t, r, n in map(_columns, (requests, shuffled))
    )
    assert one.value == other.value
    assert one.interval is not None
    assert other.interval is not None
    assert (one.interval.low, one.interval.high) == pytest.approx(
        (other.interval.low, other.interval.high)
    )
    assert one.value is not None
    assert one.interval.low <= one.value * (1 + 1e-9)
    assert one.interval.high >= one.value * (1 - 1e-9)


def _columns(
    requests: list[tuple[float, int, int]],
) -> tuple[list[float], list[int], list[int]]:
    return [r[0] for r in requests], [r[1] for r in requests], [r[2] for r in requests]


def test_what_is_too_few_for_one_repeat_stays_without_a_value() -> None:
    few = found_in(np.ones((3, 30)), 0.99)
    assert (few.value, few.needed, few.count) == (None, 100, 90)


def test_ends_that_nothing_encloses_are_none() -> None:
    """40 requests four times do not have a p99, however often they are served."""
    times = np.tile(np.arange(1.0, 41.0), (4, 1))
    found = found_in(times, 0.99)
    assert found.value is not None
    assert found.interval is None


def test_a_quantile_of_0_has_no_interval() -> None:
    assert found_in(np.zeros((2, 20)), 0.5).interval is None
