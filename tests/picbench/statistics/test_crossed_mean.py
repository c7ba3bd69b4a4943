"""Means over requests and repeats."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.compare.intervals import CrossedMean, StudentMean, sum_clusters

PARTS = st.tuples(st.floats(0.001, 10), st.floats(0.001, 10), st.integers(2, 20))


def crossed(values: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> CrossedMean:
    """Of values [repeats, rows]."""
    repeats, rows = (index.ravel().tolist() for index in np.indices(values.shape))
    return CrossedMean(
        StudentMean.of(sum_clusters(values.ravel(), rows)),
        StudentMean.of(sum_clusters(values.ravel(), repeats)),
    )


@pytest.mark.parametrize(("repeats", "size"), [(2, 0.1), (3, 0.05), (3, 0.1), (5, 0.1)])
def test_intervals_cover_the_truth_where_repeats_differ(repeats: int, size: float) -> None:
    """95 % of 500, less three standard errors; over rows alone a lot less."""
    rng = np.random.default_rng(repeats)
    hits = rows_alone = 0
    for _ in range(500):
        shifts = size * rng.normal(size=(repeats, 1)) + 0.1 * rng.normal(size=30)
        found = crossed(shifts + 0.05 * rng.normal(size=(repeats, 30)))
        hits += 0 in found.interval()
        alone = found.rows.interval()
        assert alone is not None
        rows_alone += 0 in alone
    assert hits / 500 >= 0.921
    assert rows_alone / 500 <= 0.80


def test_p_is_right_where_nothing_but_repeats_differs() -> None:
    """Of 500 tests at 5 % as many reject as chance has it: not more than three errors above."""
    rng = np.random.default_rng(4)
    rejected = sum(
        crossed(rng.normal(size=(4, 1)) + 0.1 * rng.normal(size=(4, 20))).p <= 0.05
        for _ in range(500)
    )
    assert 0.01 <= rejected / 500 <= 0.079


@given(PARTS, PARTS, st.floats(-20, 20))
def test_p_and_interval_agree(
    rows: tuple[float, float, int], repeats: tuple[float, float, int], mean: float
) -> None:
    found = CrossedMean(
        StudentMean(mean, rows[0], rows[2]), StudentMean(mean, repeats[0], repeats[2])
    )
    assert 0 <= found.p <= 1
    for level in (0.5, 0.95, 0.999):
        if abs(found.p - (1 - level)) > 1e-9:
            assert (0 in found.interval(level)) == (found.p > 1 - level)
    assert found.freedom >= min(rows[2], repeats[2]) - 1 - 1e-9
    assert found.freedom <= rows[2] + repeats[2] - 2 + 1e-9


def test_repeats_that_do_not_differ_leave_students_interval() -> None:
    values = np.random.default_rng(0).normal(size=12)
    found, alone = crossed(np.tile(values, (3, 1))), StudentMean.of(sum_clusters(values))
    expected = alone.interval()
    assert expected is not None
    assert (found.interval().low, found.interval().high) == pytest.approx(
        (expected.low, expected.high)
    )
    assert found.p == pytest.approx(alone.p)
    assert found.freedom == pytest.approx(11)


@pytest.mark.parametrize(("value", "p"), [(0.0, 1.0), (3.0, 0.0)])
def test_what_does_not_vary(value: float, p: float) -> None:
    found = crossed(np.full((2, 5), value))
    assert found.p == p
    assert found.interval().half_width == 0
    assert found.freedom == 4
