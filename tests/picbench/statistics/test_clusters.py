"""Grouping values by cluster."""

import numpy as np
import pytest

from picbench.compare.intervals import sum_clusters


def test_sums_and_counts_are_by_cluster() -> None:
    found = sum_clusters(np.array([1.0, 2.0, 4.0]), ["b", "a", "b"])
    assert found.sums.tolist() == [5.0, 2.0]
    assert found.counts.tolist() == [2.0, 1.0]
    assert found.mean == pytest.approx(7 / 3)


def test_without_clusters_each_value_is_one() -> None:
    found = sum_clusters(np.array([1.0, 2.0]))
    assert found.sums.tolist() == [1.0, 2.0]
    assert found.counts.tolist() == [1.0, 1.0]


def test_nothing_and_other_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        sum_clusters(np.array([]))
    with pytest.raises(ValueError, match="2 values in 1 clusters"):
        sum_clusters(np.array([1.0, 2.0]), ["a"])
