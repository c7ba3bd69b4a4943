"""Means over few clusters."""

import numpy as np
import pytest
from scipy import stats  # type: ignore[import-untyped]

from picbench.compare.intervals import StudentMean, sum_clusters
from picbench.compare.significance import sign_flip


def test_single_values_have_the_textbooks_interval_and_p() -> None:
    values = np.random.default_rng(0).normal(0.5, 1, 9)
    found, reference = StudentMean.of(sum_clusters(values)), stats.ttest_1samp(values, 0)
    expected = reference.confidence_interval(0.95)
    interval = found.interval()
    assert interval is not None
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high))
    assert found.p == pytest.approx(reference.pvalue)


def test_few_clusters_can_be_significant() -> None:
    values = sum_clusters(np.array([1.0, 1.1, 0.9, 1.05]))
    assert StudentMean.of(values).p < 0.001
    assert sign_flip(values) == 1 / 8


@pytest.mark.parametrize("groups", [4, 8])
def test_intervals_of_few_clusters_cover_the_truth(groups: int) -> None:
    """95 % of 600, and three standard errors; the last cluster is a small one."""
    rng = np.random.default_rng(groups)
    names = np.repeat(np.arange(groups), [16] * (groups - 1) + [4])
    hits = 0
    for _ in range(600):
        values = rng.normal(size=groups)[names] + rng.normal(size=len(names))
        interval = StudentMean.of(sum_clusters(values, names.tolist())).interval()
        assert interval is not None
        hits += 0 in interval
    assert hits / 600 >= 0.923


@pytest.mark.parametrize(("means", "p"), [([0.0, 0.0], 1.0), ([3.0], 1.0), ([2.0, 2.0], 0.0)])
def test_what_does_not_vary(means: list[float], p: float) -> None:
    assert StudentMean.of(sum_clusters(np.array(means))).p == p


def test_one_cluster_has_no_interval() -> None:
    assert StudentMean.of(sum_clusters(np.array([1.0, 2.0]), ["a", "a"])).interval() is None
