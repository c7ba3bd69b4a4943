"""BCa intervals: scipy's where scipy has them, and coverage where it has none."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats  # type: ignore[import-untyped]

from picbench.compare.intervals import ClusterSums, MeanBootstrap, sum_clusters

VALUES = st.lists(st.integers(-1000, 1000).map(float), min_size=2, max_size=40)


def interval(values: ClusterSums, seed: int = 0, resamples: int = 4000) -> tuple[float, float]:
    found = MeanBootstrap(values, seed, resamples).interval()
    assert found is not None
    return found.low, found.high


def test_few_clusters_are_widened_as_in_hesterberg() -> None:
    """Of eight values, without bias and skewness: the ends are quantiles of resampled means.

    At 80 % Student's quantile of 7 degrees is 1.4149, times sqrt(8 / 7) 1.5126; the normal
    probability of that is 0.93481. All 6435 different resamples, weighted, have their quantile of
    this probability at 1.6725 (for 9 degrees it would be at 1.641, without the factor at 1.565).
    """
    half = np.array([1.0, 2.31, 3.17, 4.73])
    bootstrap = MeanBootstrap(sum_clusters(np.concatenate([half, -half])), resamples=400_000)
    found = bootstrap.interval(0.8)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((-1.6725, 1.6725), abs=0.012)
    assert found.half_width == pytest.approx(1.6725, abs=0.012)


@pytest.mark.parametrize("draw", ["normal", "exponential"])
def test_unclustered_intervals_are_scipys(draw: str) -> None:
    """Within the noise of resampling, and the widening for 300 clusters (0.4 %)."""
    values = getattr(np.random.default_rng(5), draw)(size=300)
    reference = stats.bootstrap(
        (values,), np.mean, method="BCa", n_resamples=20000, rng=np.random.default_rng(1)
    ).confidence_interval
    low, high = interval(sum_clusters(values), resamples=20000)
    width = reference.high - reference.low
    assert low == pytest.approx(reference.low, abs=0.03 * width)
    assert high == pytest.approx(reference.high, abs=0.03 * width)


@pytest.mark.parametrize("groups", [12, 40])
def test_clustered_intervals_cover_the_truth(groups: int) -> None:
    """95 % of 400 intervals, give or take three standard errors, for samples that are not alone."""
    rng = np.random.default_rng(groups)
    hits = 0
    for trial in range(400):
        sizes = rng.integers(2, 8, groups)
        names = np.repeat(np.arange(groups), sizes)
        values = np.repeat(rng.normal(size=groups), sizes) + rng.normal(size=len(names))
        low, high = interval(sum_clusters(values, names.tolist()), trial, 1000)
        hits += low <= 0 <= high
    assert 0.917 <= hits / 400 <= 0.983


def test_ignoring_clusters_would_not_cover() -> None:
    """What clusters are for: the same samples as if they were independent."""
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        values = np.repeat(rng.normal(size=30), 6)
        low, high = interval(sum_clusters(values), trial, 500)
        hits += low <= 0 <= high
    assert hits / 200 < 0.75


@given(VALUES, st.integers(0, 50), st.sampled_from([0.5, 2.0, 8.0]))
def test_shifting_and_scaling_values_does_it_to_the_interval(
    values: list[float], shift: int, scale: float
) -> None:
    array = np.array(values) + 1001  # Without zeros, which are not drawn: the draws stay the same.
    low, high = interval(sum_clusters(array), resamples=200)
    moved = interval(sum_clusters(scale * array + shift), resamples=200)
    assert moved == pytest.approx((scale * low + shift, scale * high + shift), abs=1e-6)


@given(VALUES)
def test_an_interval_stays_between_the_extremes(values: list[float]) -> None:
    low, high = interval(sum_clusters(np.array(values)), resamples=200)
    assert min(values) - 1e-9 <= low <= high <= max(values) + 1e-9


@given(VALUES)
def test_a_higher_level_encloses_a_lower_one(values: list[float]) -> None:
    bootstrap = MeanBootstrap(sum_clusters(np.array(values)), resamples=200)
    wide, narrow = bootstrap.interval(0.95), bootstrap.interval(0.8)
    assert wide is not None
    assert narrow is not None
    assert wide.low <= narrow.low <= narrow.high <= wide.high


def test_equal_values_have_an_interval_of_no_width() -> None:
    assert interval(sum_clusters(np.full(5, 0.25))) == (0.25, 0.25)


def test_one_cluster_has_no_interval() -> None:
    bootstrap = MeanBootstrap(sum_clusters(np.array([1.0, 2.0]), ["a", "a"]))
    assert bootstrap.interval() is None


def test_a_seed_decides_the_interval() -> None:
    values = sum_clusters(np.random.default_rng(0).normal(size=50))
    assert interval(values, 3) == interval(values, 3)
    assert interval(values, 3) != interval(values, 4)
