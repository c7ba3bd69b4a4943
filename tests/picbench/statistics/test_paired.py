"""Paired differences and ratios."""

from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.compare.significance import paired_difference, paired_ratio, paired_scores

TIMES = st.lists(st.tuples(*[st.floats(0.1, 100)] * 2), min_size=2, max_size=20)


def test_a_difference_counts_and_measures() -> None:
    found = paired_difference([0.0, 1.0, 1.0, 0.5], [1.0, 1.0, 0.0, 0.75])
    assert found.value == pytest.approx(0.0625)
    assert (found.higher, found.equal, found.lower) == (2, 1, 1)
    assert (found.pairs, found.clusters) == (4, 4)
    assert found.exact_p is None


def test_scores_of_0_and_1_get_mcnemars_p() -> None:
    before, after = [1.0] * 20, [0.0] * 6 + [1.0] * 14
    found = paired_difference(before, after)
    assert found.exact_p == pytest.approx(2 / 2**6)
    assert found.p == pytest.approx(2 / 2**6)
    assert paired_difference(before, after, ["a", "b"] * 10).exact_p is None


def test_the_standard_error_is_the_textbooks_for_single_samples() -> None:
    values = np.random.default_rng(0).normal(size=50)
    found = paired_difference([0.0] * 50, values.tolist())
    assert found.standard_error == pytest.approx(values.std(ddof=1) / sqrt(50))


def test_a_constant_slowdown_is_measured_exactly() -> None:
    found = paired_ratio([1.0, 2.0, 40.0], [1.05, 2.1, 42.0])
    assert found.value == pytest.approx(1.05)
    assert found.interval is not None
    assert (found.interval.low, found.interval.high) == pytest.approx((1.05, 1.05))
    assert found.standard_error == pytest.approx(0, abs=1e-12)


@given(TIMES)
def test_a_ratio_the_other_way_round_is_its_inverse(times: list[tuple[float, float]]) -> None:
    before, after = zip(*times, strict=True)
    there, back = paired_ratio(before, after), paired_ratio(after, before)
    assert there.value * back.value == pytest.approx(1)
    assert (there.higher, there.lower) == (back.lower, back.higher)
    assert there.p == pytest.approx(back.p, abs=0.02)


@given(TIMES, st.floats(0.01, 100))
def test_a_faster_clock_changes_no_ratio(times: list[tuple[float, float]], unit: float) -> None:
    before, after = (list(side) for side in zip(*times, strict=True))
    scaled = paired_ratio([unit * t for t in before], [unit * t for t in after])
    assert scaled.value == pytest.approx(paired_ratio(before, after).value)


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=20))
def test_the_bounds_are_within_the_interval(changes: list[float]) -> None:
    found = paired_difference([0.0] * len(changes), changes)
    assert found.interval is not None
    assert found.one_sided is not None
    assert found.interval.low <= found.one_sided.low
    assert found.one_sided.high <= found.interval.high


def test_no_interval_of_scores_leaves_what_scores_can_differ_by() -> None:
    """Student's t of four samples reaches to 1.3 here, and 1 is the most that can be won."""
    lost, won = [0.0] * 4, [1.0, 1.0, 1.0, 0.0]
    free, found = paired_difference(lost, won), paired_scores(lost, won)
    assert free.interval is not None
    assert found.interval is not None
    assert found.one_sided is not None
    assert free.interval.high > 1
    assert (found.interval.low, found.interval.high) == (free.interval.low, 1.0)
    assert found.one_sided.high == 1.0
    back = paired_scores(won, lost)
    assert back.interval is not None
    assert (back.interval.low, back.interval.high) == (-1.0, -found.interval.low)


def test_one_cluster_is_one_observation() -> None:
    found = paired_difference([0.0, 0.0], [1.0, 1.0], ["a", "a"])
    assert found.interval is None
    assert found.p == 1.0
    assert found.standard_error == 0.0


def test_unpaired_and_impossible_values_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be paired"):
        paired_difference([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="positive"):
        paired_ratio([0.0], [1.0])
    with pytest.raises(ValueError, match="no values"):
        paired_ratio([], [])


def test_repeats_that_differ_are_in_the_interval_of_a_ratio() -> None:
    """The second arm was 10 % slower in one repeat and 10 % faster in the other."""
    before = np.exp(np.random.default_rng(0).normal(4, 0.3, 40)).tolist()
    after = [*(1.1 * time for time in before), *(time / 1.1 for time in before)]
    repeats = [0] * 40 + [1] * 40
    rows = [*range(40)] * 2
    alone = paired_ratio(before * 2, after, rows)
    found = paired_ratio(before * 2, after, rows, repeats=repeats)
    assert (alone.repeats, found.repeats) == (1, 2)
    assert found.value == alone.value == pytest.approx(1.0)
    assert found.interval is not None
    # Student's t of one degree, 12.706, times the standard error of two repeats: log 1.1.
    assert found.interval.high == pytest.approx(1.1**12.706, rel=1e-3)
    assert found.standard_error == pytest.approx(np.log(1.1))
    assert (alone.freedom, found.freedom) == (39, pytest.approx(1))
    assert found.p == pytest.approx(1.0)


def test_a_single_repeat_changes_nothing() -> None:
    before, after = [1.0, 2.0, 4.0], [1.5, 2.0, 5.0]
    assert paired_ratio(before, after, repeats=[0, 0, 0]) == paired_ratio(before, after)
