"""Arrival times have the rate that was asked for."""

from math import exp, sqrt
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.workloads.traffic.draw import arrival_times

COUNT = 20_000


@pytest.mark.parametrize("rate", [0.2, 15.0])
def test_poisson_gaps_are_exponential(rate: float) -> None:
    times = arrival_times(Random(3), COUNT, rate, "poisson")
    gaps = [b - a for a, b in zip((0.0, *times), times, strict=False)]
    assert abs(sum(gaps) / COUNT - 1 / rate) < 5 / rate / sqrt(COUNT)
    long = sum(gap > 1 / rate for gap in gaps) / COUNT
    assert abs(long - exp(-1)) < 5 * sqrt(exp(-1) * (1 - exp(-1)) / COUNT)


def test_uniform_arrivals_are_spaced_evenly_from_the_start() -> None:
    assert arrival_times(Random(0), 4, 2.0, "uniform") == (0.0, 0.5, 1.0, 1.5)


@given(st.integers(0, 2**32), st.integers(1, 100), st.floats(0.01, 1000))
def test_arrivals_come_in_order_and_scale_with_the_rate(seed: int, count: int, rate: float) -> None:
    times = arrival_times(Random(seed), count, rate, "poisson")
    assert list(times) == sorted(times)
    doubled = arrival_times(Random(seed), count, 2 * rate, "poisson")
    assert doubled == pytest.approx([time / 2 for time in times])
