"""Intervals of means over the same rows."""

import pytest

from picbench.compare.intervals import difference_interval, ratio_interval

SCORES = [0.0, 1.0, 0.5, 0.25] * 10


def test_a_higher_level_and_more_resamples_reach_further_into_the_tails() -> None:
    usual, sure = (difference_interval(SCORES, [0.5] * 40, level) for level in (0.95, 0.999))
    assert sure.low < usual.low < usual.high < sure.high
    assert (usual.level, sure.level) == (0.95, 0.999)
    more = difference_interval(SCORES, [0.5] * 40, 0.999, resamples=20_000)
    assert more.low == pytest.approx(sure.low, abs=0.03)
    assert more != sure


def test_a_ratio_and_a_difference_of_the_same_rows_agree_on_no_change() -> None:
    assert 0.0 in difference_interval(SCORES, SCORES[::-1])
    found = ratio_interval(SCORES, SCORES[::-1])
    assert found is not None
    assert 1.0 in found


def test_too_few_rows_and_nothing_to_divide_by_have_no_interval() -> None:
    with pytest.raises(ValueError, match="one row has no interval"):
        difference_interval([1.0], [0.5])
    assert ratio_interval([0.5] * 4, [1.0, 0.0, 0.0, 0.0]) is None
