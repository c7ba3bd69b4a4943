"""Quantiles with intervals, and their refusal."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.compare.intervals import quantile, values_needed


@pytest.mark.parametrize(
    ("q", "needed"), [(0.5, 2), (0.9, 10), (0.95, 20), (0.99, 100), (0.999, 1000), (0.01, 100)]
)
def test_a_quantile_needs_a_value_beyond_it(q: float, needed: int) -> None:
    assert values_needed(q) == needed
    assert quantile([1.0] * (needed - 1), q).value is None
    assert quantile([1.0] * needed, q).value == 1.0


@pytest.mark.parametrize("q", [0.0, 1.0, 1.5])
def test_extremes_are_no_quantiles(q: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        values_needed(q)


@pytest.mark.parametrize(("q", "count"), [(0.5, 30), (0.9, 80), (0.99, 600)])
def test_intervals_cover_the_true_quantile(q: float, count: int) -> None:
    """At least 95 % of 600, less three standard errors; discrete ones are conservative."""
    rng = np.random.default_rng(count)
    truth = -np.log(1 - q)
    hits = 0
    for _ in range(600):
        found = quantile(rng.exponential(size=count).tolist(), q).interval
        assert found is not None
        hits += truth in found
    assert hits / 600 >= 0.923


def test_an_interval_that_nothing_encloses_is_none() -> None:
    """Of 100 values the largest is below the true p99 in 37 % of experiments."""
    found = quantile([float(i) for i in range(100)], 0.99)
    assert found.value == pytest.approx(98.01)
    assert found.interval is None


@given(st.lists(st.floats(0, 1e6), min_size=10, max_size=60))
def test_the_median_is_in_its_interval(values: list[float]) -> None:
    found = quantile(values, 0.5)
    assert found.interval is not None
    assert found.value in found.interval  # type: ignore[operator]
