"""The median of requests whose times scatter."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.profile.costs import CellSpread, alike, deviations, scattered_median


def test_the_quickest_of_the_slow_requests_are_in_the_middle() -> None:
    """As measured: 26 requests take 15 ms and 38 take 20, give or take an eighth."""
    usual = [0.015] * 26 + [0.020] * 38
    rng = np.random.default_rng(0)
    drawn = np.array(usual) * np.exp(0.12 * rng.standard_normal((4000, len(usual))))
    measured = float(np.median(drawn, axis=1).mean())
    found = scattered_median(usual, np.full(len(usual), 0.12))
    assert found == pytest.approx(measured, rel=0.01)
    assert found < 0.95 * float(np.median(usual))


def test_one_slow_request_is_enough_where_half_are_of_the_next_size() -> None:
    usual = [0.037] * 33 + [0.048] * 31
    found = scattered_median(usual, np.full(len(usual), 0.03))
    assert 0.038 < found < 0.042


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


def test_without_scatter_it_is_the_median() -> None:
    usual = [3.0, 1.0, 2.0, 10.0]
    assert scattered_median(usual, np.zeros(4)) == 2.5
    assert scattered_median([0.0, 0.0], np.full(2, 0.1)) == 0.0


def test_scatter_is_that_of_cells_about_as_large() -> None:
    def cells(computed: float, deviation: float) -> list[tuple[float, float]]:
        return [(computed + i, float(np.exp(1.6449 * deviation))) for i in range(20)]

    tails = CellSpread.of(cells(100.0, 0.10) + cells(3000.0, 0.02))
    found = deviations(tails, [50.0, 5000.0, 50.0, 0.0])
    assert found == pytest.approx([0.10, 0.02, 0.10, 0.10], rel=1e-3)


def test_few_cells_say_nothing_and_quick_ones_do_not_scatter() -> None:
    assert not deviations(CellSpread.of((100.0, 1.5) for _ in range(19)), [100.0, 1.0]).any()
    # Of two requests the 95th percentile may be below a rounded median.
    assert not deviations(CellSpread.of((100.0, 0.99) for _ in range(20)), [100.0]).any()


@pytest.mark.parametrize(
    ("computed", "middle", "same"),
    [(100.0, 102.0, True), (100.0, 108.0, False), (1.0, 3.0, True), (4000.0, 3930.0, True)],
)
def test_cells_of_like_requests_tell(computed: float, middle: float, same: bool) -> None:
    assert alike(computed, middle) is same
