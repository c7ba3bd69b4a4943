"""Intervals over rows: paired, of the right width, and the same in every run."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picbench.experiments.arm_scores import RowInterval, difference_of, ratio_of

SCORES = st.lists(st.floats(0, 1), min_size=20, max_size=20)


def test_equal_arms_differ_by_nothing_at_all() -> None:
    scores = [0.0, 1.0, 0.3, 0.7] * 5
    found = difference_of(scores, scores)
    assert (found.value, found.low, found.high) == (0.0, 0.0, 0.0)


def test_rows_are_paired() -> None:
    hard = np.linspace(0.0, 1.0, 200)
    found = difference_of(hard * 0.9 + 0.1, hard * 0.9)
    assert (found.low, found.high) == (pytest.approx(0.1), pytest.approx(0.1))


def test_the_interval_of_a_share_is_about_its_standard_error() -> None:
    right = [1.0] * 120 + [0.0] * 80
    found = difference_of(right, [0.0] * 200)
    error = (0.6 * 0.4 / 200) ** 0.5
    assert found.value == pytest.approx(0.6)
    assert found.low == pytest.approx(0.6 - 1.96 * error, abs=0.01)
    assert found.high == pytest.approx(0.6 + 1.96 * error, abs=0.01)


@settings(max_examples=20)
@given(SCORES, SCORES)
def test_the_estimate_is_within_its_interval_and_turns_around(
    first: list[float], second: list[float]
) -> None:
    one, other = difference_of(first, second), difference_of(second, first)
    assert one.low - 1e-6 <= one.value <= one.high + 1e-6
    assert (one.value, one.low) == (pytest.approx(-other.value), pytest.approx(-other.high))


def test_one_row_has_no_interval() -> None:
    with pytest.raises(ValueError, match="one row"):
        difference_of([1.0], [0.5])


def test_a_ratio_to_full_marks_is_the_mean() -> None:
    first = [0.5] * 100 + [1.0] * 100
    found = ratio_of(first, [1.0] * 200)
    same = difference_of(first, [0.0] * 200)
    assert found is not None
    assert found.value == pytest.approx(0.75)
    assert found.low == pytest.approx(same.low, abs=0.005)
    assert found.high == pytest.approx(same.high, abs=0.005)


def test_a_ratio_of_equal_arms_is_one_however_hard_rows_are() -> None:
    scores = [0.0, 1.0, 0.3, 0.7] * 5
    found = ratio_of(scores, scores)
    assert found == RowInterval(1.0, 1.0, 1.0)


def test_a_ratio_needs_a_divisor_in_every_resample() -> None:
    assert ratio_of([0.5] * 4, [1.0, 0.0, 0.0, 0.0]) is None


def test_ratios_cover_what_they_claim_where_few_rows_lose_much() -> None:
    """Percentiles of resamples cover 89 % here (400 trials), and 83 % of 20 rows."""
    draw = np.random.default_rng(3)
    covered = 0
    for _ in range(300):
        full = (draw.random(50) < 0.7) * draw.choice([0.5, 1.0], 50)
        one = np.where(draw.random(50) < 0.2, full * draw.random(50), full)
        found = ratio_of(list(one), list(full))
        assert found is not None
        covered += found.low <= 0.9 <= found.high
    assert covered / 300 >= 0.92


def test_the_same_rows_give_the_same_interval() -> None:
    scores = [0.0, 1.0] * 30
    found = [difference_of(scores, [0.5] * 60) for _ in range(2)]
    assert found[0] == found[1]


def test_numbers_are_written_with_their_interval() -> None:
    assert str(RowInterval(0.5, 0.25, 0.75)) == "0.500 [0.250, 0.750]"
    assert RowInterval(-0.5, -0.75, 0.25).signed == "-0.500 [-0.750, +0.250]"
