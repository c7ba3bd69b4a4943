"""The range in which single measurements lie around a prediction."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.profile.costs import CellSpread


def test_few_cells_have_no_spread() -> None:
    assert CellSpread.of((100.0, 1.0) for _ in range(19)) is None
    assert CellSpread.of(()) is None


def test_small_requests_have_the_spread_of_small_ones() -> None:
    small = [(48.0, ratio) for ratio in np.linspace(0.5, 2.0, 100)]
    large = [(4096.0, ratio) for ratio in np.linspace(0.99, 1.01, 200)]
    found = CellSpread.of(small + large)
    assert found is not None
    assert found.around(10.0, 60) == pytest.approx((5.75, 19.25))
    low, high = found.around(10.0, 3000)
    assert 9.9 < low < 9.92
    assert 10.08 < high < 10.1


@given(
    st.lists(st.tuples(st.floats(0, 1e5), st.floats(0.1, 10)), min_size=20, max_size=80),
    st.floats(0, 1e6),
    st.floats(1e-3, 1e3),
)
def test_a_range_is_within_what_was_measured(
    cells: list[tuple[float, float]], computed: float, value: float
) -> None:
    found = CellSpread.of(cells)
    assert found is not None
    low, high = found.around(value, computed)
    ratios = [ratio for _, ratio in cells]
    assert min(ratios) * value * (1 - 1e-9) <= low <= high <= max(ratios) * value * (1 + 1e-9)


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


def test_a_median_may_be_that_of_the_next_size() -> None:
    spread = CellSpread.of((100.0, 1.0) for _ in range(20))
    assert spread is not None
    few = [1.0] * 5 + [2.0] * 4
    assert spread.around_median(few, [100.0] * 9) == pytest.approx((1.0, 2.0))
    many = [1.0] * 6000 + [2.0] * 4000
    assert spread.around_median(many, [100.0] * 10_000) == pytest.approx((1.0, 1.0))
    assert spread.around_median([3.0], [100.0]) == pytest.approx((3.0, 3.0))
