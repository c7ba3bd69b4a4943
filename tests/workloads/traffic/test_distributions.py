"""Popularity and arrival times have the right distributions."""

from collections import Counter
from math import exp, sqrt
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.workloads.traffic.draw import arrival_times, pick, zipf

DRAWS = 20_000


@given(st.integers(1, 200), st.floats(0, 10))
def test_weights_sum_to_one_and_never_rise(count: int, exponent: float) -> None:
    weights = zipf(count, exponent)
    assert sum(weights) == pytest.approx(1)
    assert list(weights) == sorted(weights, reverse=True)


def test_weights_follow_zipfs_law() -> None:
    assert zipf(4, 0) == (0.25,) * 4
    first, second, third = zipf(3, 2)
    assert first / second == pytest.approx(4)
    assert first / third == pytest.approx(9)


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.5])
def test_single_draws_have_the_weights_as_frequencies(exponent: float) -> None:
    rng = Random(1)
    weights = zipf(8, exponent)
    seen = Counter(pick(rng, weights, 1)[0] for _ in range(DRAWS))
    for index, weight in enumerate(weights):
        error = sqrt(weight * (1 - weight) / DRAWS)
        assert abs(seen[index] / DRAWS - weight) < 5 * error


def test_second_draws_are_weighted_among_what_is_left() -> None:
    rng = Random(2)
    weights = (0.5, 0.3, 0.2)
    pairs = Counter(tuple(pick(rng, weights, 2)) for _ in range(DRAWS))
    wanted = 0.5 * 0.3 / (0.3 + 0.2)
    assert abs(pairs[0, 1] / DRAWS - wanted) < 5 * sqrt(wanted * (1 - wanted) / DRAWS)


@given(
    st.integers(0, 2**32),
    st.integers(1, 30),
    st.floats(0, 3),
    st.integers(0, 30),
    st.sets(st.integers(0, 29)),
)
def test_nothing_is_drawn_twice_and_nothing_that_is_excluded(
    seed: int, size: int, exponent: float, count: int, without: set[int]
) -> None:
    drawn = pick(Random(seed), zipf(size, exponent), count, without)
    assert len(set(drawn)) == len(drawn)
    assert not set(drawn) & without
    assert len(drawn) == min(count, size - len(without & set(range(size))))


@pytest.mark.parametrize("rate", [0.2, 15.0])
def test_poisson_gaps_are_exponential(rate: float) -> None:
    times = arrival_times(Random(3), DRAWS, rate, "poisson")
    gaps = [b - a for a, b in zip((0.0, *times), times, strict=False)]
    assert abs(sum(gaps) / DRAWS - 1 / rate) < 5 / rate / sqrt(DRAWS)
    long = sum(gap > 1 / rate for gap in gaps) / DRAWS
    assert abs(long - exp(-1)) < 5 * sqrt(exp(-1) * (1 - exp(-1)) / DRAWS)


def test_uniform_arrivals_are_spaced_evenly_from_the_start() -> None:
    assert arrival_times(Random(0), 4, 2.0, "uniform") == (0.0, 0.5, 1.0, 1.5)


@given(st.integers(0, 2**32), st.integers(1, 100), st.floats(0.01, 1000))
def test_arrivals_come_in_order_and_scale_with_the_rate(seed: int, count: int, rate: float) -> None:
    times = arrival_times(Random(seed), count, rate, "poisson")
    assert list(times) == sorted(times)
    doubled = arrival_times(Random(seed), count, 2 * rate, "poisson")
    assert doubled == pytest.approx([time / 2 for time in times])
