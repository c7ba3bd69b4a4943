"""Intervals of means and quantiles: scipy's where it has them, and coverage where it has none."""

from collections.abc import Callable
from functools import partial
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured_arms import known
from numpy.random import Generator
from scipy import stats  # type: ignore[import-untyped]

from picbench.statistics.intervals import (
    BoundedMean,
    ClusterSums,
    MeanBootstrap,
    Quantile,
    StudentMean,
    mean_ratio,
    quantile,
    score_ratio,
    sum_clusters,
)

Times = npt.NDArray[np.float64]


def test_sums_and_counts_are_by_cluster() -> None:
    found = sum_clusters(np.array([1.0, 2.0, 4.0]), ["b", "a", "b"])
    assert found.sums.tolist() == [5.0, 2.0]
    assert found.counts.tolist() == [2.0, 1.0]
    assert found.mean == pytest.approx(7 / 3)
    alone = sum_clusters(np.array([1.0, 2.0]))
    assert (alone.sums.tolist(), alone.counts.tolist()) == ([1.0, 2.0], [1.0, 1.0])


def test_nothing_and_other_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        sum_clusters(np.array([]))
    with pytest.raises(ValueError, match="2 values in 1 clusters"):
        sum_clusters(np.array([1.0, 2.0]), ["a"])


VALUES = st.lists(st.integers(-1000, 1000).map(float), min_size=2, max_size=40)


def interval(values: ClusterSums, seed: int = 0, resamples: int = 4000) -> tuple[float, float]:
    found = known(MeanBootstrap(values, seed, resamples).interval())
    return found.low, found.high


def test_few_clusters_are_widened_as_in_hesterberg() -> None:
    """Of eight values, without bias and skewness: the ends are quantiles of resampled means.

    At 80 % Student's quantile of 7 degrees is 1.4149, times sqrt(8 / 7) 1.5126; the normal
    probability of that is 0.93481. All 6435 different resamples, weighted, have their quantile of
    this probability at 1.6725 (for 9 degrees it would be at 1.641, without the factor at 1.565).
    """
    half = np.array([1.0, 2.31, 3.17, 4.73])
    bootstrap = MeanBootstrap(sum_clusters(np.concatenate([half, -half])), resamples=400_000)
    found = known(bootstrap.interval(0.8))
    assert (found.low, found.high) == pytest.approx((-1.6725, 1.6725), abs=0.012)


@pytest.mark.parametrize(
    "draw", [Generator.normal, Generator.exponential, partial(Generator.lognormal, sigma=1.5)]
)
def test_unclustered_intervals_are_scipys(draw: Callable[..., Times]) -> None:
    """Within the noise of resampling, and the widening for 300 clusters (0.4 %)."""
    values = draw(np.random.default_rng(5), size=300)
    reference = stats.bootstrap(
        (values,), np.mean, method="BCa", n_resamples=20000, rng=np.random.default_rng(1)
    ).confidence_interval
    low, high = interval(sum_clusters(values), resamples=20000)
    width = reference.high - reference.low
    assert low == pytest.approx(reference.low, abs=0.03 * width)
    assert high == pytest.approx(reference.high, abs=0.03 * width)


def test_a_cluster_counts_by_its_size_in_each_resample() -> None:
    """Each tenth cluster has nine values of about 1, the others one of about 0."""
    large = np.arange(200) % 10 == 0
    sizes = np.where(large, 9.0, 1.0)
    noise = np.random.default_rng(3).normal(scale=0.01, size=200)
    low, high = interval(ClusterSums((large + noise) * sizes, sizes))
    assert low < 0.5 < high


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


@given(VALUES, st.integers(0, 50), st.sampled_from([0.5, 2.0, 8.0]))
def test_shifting_and_scaling_values_does_it_to_the_interval(
    values: list[float], shift: int, scale: float
) -> None:
    array = np.array(values)
    low, high = interval(sum_clusters(array), resamples=200)
    moved = interval(sum_clusters(scale * array + shift), resamples=200)
    assert moved == pytest.approx((scale * low + shift, scale * high + shift), abs=1e-6)


@given(VALUES)
def test_an_interval_stays_between_the_extremes(values: list[float]) -> None:
    low, high = interval(sum_clusters(np.array(values)), resamples=200)
    assert min(values) - 1e-9 <= low <= high <= max(values) + 1e-9


@given(st.integers(2, 60), st.data())
def test_intervals_of_right_and_wrong_answers_are_exact(count: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, count))
    values = sum_clusters(np.repeat([1.0, 0.0], [right, count - right]))
    found = known(BoundedMean(values, 0, 1).interval())
    exact = stats.binomtest(right, count).proportion_ci()
    assert (found.low, found.high) == pytest.approx((exact.low, exact.high), abs=1e-9)


@pytest.mark.parametrize("weight", [1.0, 0.4])
@pytest.mark.parametrize("sets", [3, 30])
def test_ends_are_quantiles_of_means_with_random_weights(sets: int, weight: float) -> None:
    """Of 100,000 such means each, within the noise of 1 in 40 and what the saddlepoint leaves."""
    rng = np.random.default_rng(sets)
    counts = rng.integers(1, 9, sets)
    sums = rng.binomial(counts, rng.beta(0.6, 0.3, sets))
    found = known(BoundedMean(ClusterSums(1.0 * sums, 1.0 * counts), 0, 1, weight).interval())
    shares, one = rng.gamma(weight, size=(100_000, sets)), rng.exponential(size=100_000)
    total, another = shares @ counts + one * counts.mean(), one * counts.mean()
    low, high = shares @ sums / total, (shares @ sums + another) / total
    assert (low < found.low).mean() == pytest.approx(0.025, abs=0.0025)
    assert (high > found.high).mean() == pytest.approx(0.025, abs=0.0025)


SCORES = st.lists(st.integers(0, 24).map(lambda n: n / 24), min_size=2, max_size=30)


@given(SCORES, st.floats(0.5, 0.999))
def test_intervals_of_scores_mirror_and_stay_within_their_limits(
    scores: list[float], level: float
) -> None:
    array = np.array(scores)
    found = known(BoundedMean(sum_clusters(array), 0, 1).interval(level))
    wrong = known(BoundedMean(sum_clusters(1 - array), 0, 1).interval(level))
    assert 0 <= found.low <= array.mean() + 1e-9
    assert array.mean() - 1e-9 <= found.high <= 1
    assert (1 - wrong.high, 1 - wrong.low) == pytest.approx((found.low, found.high), abs=1e-6)


def test_one_cluster_has_no_interval() -> None:
    one = sum_clusters(np.array([1.0, 2.0]), ["a", "a"])
    assert BoundedMean(one, 0, 2).interval() is None
    assert MeanBootstrap(one).interval() is None
    assert StudentMean.of(one).interval() is None


def test_single_values_have_the_textbooks_interval_and_p() -> None:
    values = np.random.default_rng(0).normal(0.5, 1, 9)
    found, reference = StudentMean.of(sum_clusters(values)), stats.ttest_1samp(values, 0)
    expected = reference.confidence_interval(0.95)
    interval = known(found.interval())
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high))
    assert found.p == pytest.approx(reference.pvalue)


@pytest.mark.parametrize("groups", [4, 8])
def test_intervals_of_few_clusters_cover_the_truth(groups: int) -> None:
    """95 % of 600, and three standard errors; the last cluster is a small one."""
    rng = np.random.default_rng(groups)
    names = np.repeat(np.arange(groups), [16] * (groups - 1) + [4])
    hits = 0
    for _ in range(600):
        values = rng.normal(size=groups)[names] + rng.normal(size=len(names))
        interval = known(StudentMean.of(sum_clusters(values, names.tolist())).interval())
        hits += 0 in interval
    assert hits / 600 >= 0.923


@pytest.mark.parametrize(("means", "p"), [([0.0, 0.0], 1.0), ([3.0], 1.0), ([2.0, 2.0], 0.0)])
def test_what_does_not_vary(means: list[float], p: float) -> None:
    assert StudentMean.of(sum_clusters(np.array(means))).p == p


def crossed(values: Times) -> StudentMean:
    """Of values [repeats, rows]."""
    repeats, rows = (index.ravel().tolist() for index in np.indices(values.shape))
    return StudentMean.of(*(sum_clusters(values.ravel(), kind) for kind in (rows, repeats)))


@pytest.mark.parametrize(("repeats", "size"), [(2, 0.1), (3, 0.05), (3, 0.1), (5, 0.1)])
def test_intervals_cover_the_truth_where_repeats_differ(repeats: int, size: float) -> None:
    """95 % of 500, less three standard errors; over rows alone a lot less."""
    rng = np.random.default_rng(repeats)
    hits = rows_alone = 0
    for _ in range(500):
        shifts = size * rng.normal(size=(repeats, 1)) + 0.1 * rng.normal(size=30)
        found = crossed(shifts + 0.05 * rng.normal(size=(repeats, 30)))
        hits += 0 in known(found.interval())
        alone = known(StudentMean(found.mean, found.parts[:1]).interval())
        rows_alone += 0 in alone
    assert hits / 500 >= 0.921
    assert rows_alone / 500 <= 0.80


PARTS = st.tuples(st.floats(0.001, 10), st.integers(2, 20))


@given(PARTS, PARTS, st.floats(-20, 20))
def test_p_and_interval_agree(
    rows: tuple[float, int], repeats: tuple[float, int], mean: float
) -> None:
    found = StudentMean(mean, (rows, repeats))
    assert 0 <= found.p <= 1
    for level in (0.5, 0.95, 0.999):
        if abs(found.p - (1 - level)) > 1e-9:
            assert (0 in known(found.interval(level))) == (found.p > 1 - level)
    assert found.freedom >= min(rows[1], repeats[1]) - 1 - 1e-9
    assert found.freedom <= rows[1] + repeats[1] - 2 + 1e-9


def test_both_kinds_of_clusters_reach_together() -> None:
    """The root of squares of 2.776 and 2 times 2.306, Student's quantiles of 4 and 8 degrees."""
    found = StudentMean(0.0, ((1.0, 5), (2.0, 9)))
    assert found.standard_error == pytest.approx(5**0.5)
    assert known(found.interval()).high == pytest.approx(5.383, abs=1e-3)


def test_repeats_that_do_not_differ_leave_students_interval() -> None:
    values = np.random.default_rng(0).normal(size=12)
    found, alone = crossed(np.tile(values, (3, 1))), StudentMean.of(sum_clusters(values))
    ends, expected = known(found.interval()), known(alone.interval())
    assert (ends.low, ends.high) == pytest.approx((expected.low, expected.high))
    assert found.p == pytest.approx(alone.p)
    assert found.freedom == pytest.approx(11)


def test_a_higher_level_and_more_resamples_reach_further_into_the_tails() -> None:
    scores = sum_clusters(np.array([-0.5, 0.5, 0.0, -0.25] * 10))
    usual, sure = (known(MeanBootstrap(scores).interval(level)) for level in (0.95, 0.999))
    assert sure.low < usual.low < usual.high < sure.high
    assert (usual.level, sure.level) == (0.95, 0.999)
    more = known(MeanBootstrap(scores, resamples=20_000).interval(0.999))
    assert more.low == pytest.approx(sure.low, abs=0.03)
    assert more != sure


def test_a_ratio_of_scores_ends_where_their_difference_may_be_zero() -> None:
    """Where all of one are right it is a mean; where none differ some others still may."""
    right, found = [1.0] * 40, [1.0] * 30 + [0.0] * 10
    mean = known(BoundedMean(sum_clusters(np.array(found)), 0.0, 1.0).interval())
    ratio = known(score_ratio(found, right))
    assert (ratio.low, ratio.high) == pytest.approx((mean.low, mean.high), abs=0.04)
    same = known(score_ratio(found, found))
    assert same.low < 0.95 and same.high > 1.05
    assert known(score_ratio([0.0] * 40, right)).low == 0.0
    assert score_ratio([1.0], [1.0]) is None
    assert score_ratio(right, [0.0] * 40) is None


@given(st.integers(5, 60), st.integers(0, 2**32 - 1), st.sampled_from([0.8, 0.95, 0.99]))
def test_a_ratio_of_scores_is_in_its_interval_and_more_in_a_higher_one(
    rows: int, seed: int, level: float
) -> None:
    dice = np.random.default_rng(seed)
    one, other = dice.random(rows).round(1), np.r_[1.0, dice.random(rows - 1).round(1)]
    usual, sure = known(score_ratio(one, other, level)), known(score_ratio(one, other, 0.999))
    assert sure.low <= usual.low <= one.mean() / other.mean() <= usual.high <= sure.high


@given(st.integers(4, 60), st.integers(0, 2**32 - 1), st.sampled_from([0.8, 0.95]))
def test_a_ratio_of_means_ends_where_students_t_rejects(n: int, seed: int, level: float) -> None:
    dice = np.random.default_rng(seed)
    other, names = dice.normal(3.0, 1.0, n), list(dice.integers(0, n, n))
    one = 0.8 * other + dice.normal(0.0, 0.5, n)
    found = mean_ratio(one.tolist(), other.tolist(), names, level)
    if found is None:  # The denominator may be 0, or all are one cluster.
        whole = StudentMean.of(sum_clusters(other, names)).interval(level)
        assert whole is None or 0.0 in whole
        return
    assert one.mean() / other.mean() in found
    for end in (found.low, found.high):
        rest = StudentMean.of(sum_clusters(one - end * other, names))
        assert rest.p == pytest.approx(1 - level, abs=1e-6)


def test_a_ratio_to_what_may_be_nothing_has_no_interval() -> None:
    assert mean_ratio([1.0, 2.0, 1.5], [1.0, -1.0, 0.5]) is None
    assert mean_ratio([1.0], [2.0]) is None
    same = known(mean_ratio([3.0, 3.1, 2.9], [3.0, 3.1, 2.9]))
    assert (same.low, same.high) == pytest.approx((1.0, 1.0))


@pytest.mark.parametrize(
    ("q", "needed"), [(0.5, 2), (0.9, 10), (0.95, 20), (0.99, 100), (0.999, 1000), (0.01, 100)]
)
def test_a_quantile_needs_a_value_beyond_it(q: float, needed: int) -> None:
    few = quantile([1.0] * (needed - 1), q)
    assert (few.value, few.needed) == (None, needed)
    enough = quantile([1.0] * needed, q)
    assert enough.value == 1.0
    # Of 100 values the largest is below the true p99 in 37 % of experiments.
    assert enough.interval is None


@pytest.mark.parametrize(("q", "count"), [(0.5, 30), (0.9, 80), (0.99, 600)])
def test_intervals_cover_the_true_quantile(q: float, count: int) -> None:
    """At least 95 % of 600, less three standard errors; discrete ones are conservative."""
    rng = np.random.default_rng(count)
    truth = -np.log(1 - q)
    hits = 0
    for _ in range(600):
        found = known(quantile(rng.exponential(size=count).tolist(), q).interval)
        hits += truth in found
    assert hits / 600 >= 0.923


TIMES = st.lists(st.floats(1, 1e4), min_size=12, max_size=40)


def found_in(times: Times, q: float) -> Quantile:
    """The quantile of times [repeats, rows]."""
    repeats, rows = np.indices(times.shape)
    return quantile(times.ravel().tolist(), q, rows.ravel().tolist(), repeats.ravel().tolist())


def lognormal(
    rng: np.random.Generator, repeats: int, rows: int, sizes: tuple[float, float, float]
) -> Times:
    """Times around 1 ms, of which repeats, rows and single requests differ by `sizes`."""
    state = sizes[0] * rng.normal(size=(repeats, 1))
    return np.exp(  # type: ignore[no-any-return]
        state + sizes[1] * rng.normal(size=rows) + sizes[2] * rng.normal(size=(repeats, rows))
    )


@pytest.mark.parametrize(
    ("q", "repeats", "rows", "sizes"),
    [
        (0.5, 2, 60, (0.10, 0.1, 0.05)),
        (0.5, 3, 100, (0.05, 0.4, 0.05)),
        (0.5, 3, 100, (0.10, 0.1, 0.05)),
        (0.5, 5, 100, (0.10, 0.4, 0.10)),
        (0.9, 5, 100, (0.10, 0.4, 0.10)),
        (0.95, 3, 200, (0.10, 0.4, 0.10)),
        (0.99, 3, 400, (0.05, 0.4, 0.05)),
    ],
)
def test_intervals_cover_the_truth_where_repeats_and_rows_differ(
    q: float, repeats: int, rows: int, sizes: tuple[float, float, float]
) -> None:
    """At least 95 % of 400, less three standard errors; as if all were independent, a lot less."""
    rng = np.random.default_rng(rows * repeats)
    truth = float(np.exp(stats.norm.ppf(q) * np.hypot.reduce(sizes)))
    hits = naive = 0
    for _ in range(400):
        times = lognormal(rng, repeats, rows, sizes)
        interval = known(found_in(times, q).interval)
        hits += truth in interval
        alone = known(quantile(times.ravel().tolist(), q).interval)
        naive += truth in alone
    assert hits / 400 >= 0.917
    assert naive / 400 <= 0.80


def test_repeats_that_find_other_machines_widen_the_interval() -> None:
    """Three repeats at 90, 100 and 110: Student's t of two degrees, 4.30, over sqrt(3)."""
    rows = np.exp(np.random.default_rng(1).normal(0, 1e-4, 100))
    found = found_in(np.outer([90.0, 100.0, 110.0], rows), 0.5)
    reach = 4.3027 * np.log([90, 100, 110]).std(ddof=1) / np.sqrt(3)
    ends = known(found.interval)
    assert found.repeats == 3
    assert np.log(100 / ends.low) == pytest.approx(reach, rel=0.01)
    assert np.log(ends.high / 100) == pytest.approx(reach, rel=0.01)


def test_requests_that_differ_widen_the_interval_of_repeats() -> None:
    """By the root of squares, at least of what independent requests would let it be."""
    rows = np.exp(np.random.default_rng(1).normal(0, 1, 100))
    times = np.outer([85.0, 100.0, 115.0], rows)
    found, alone = found_in(times, 0.5), known(quantile(times.ravel().tolist(), 0.5).interval)
    center, own = np.log(known(found.value)), np.log([np.median(repeat) for repeat in times])
    reach, ends = 4.3027 * own.std(ddof=1) / np.sqrt(3), known(found.interval)
    assert np.log(ends.high) - center >= 0.999 * np.hypot(np.log(alone.high) - center, reach)
    assert center - np.log(ends.low) >= 0.999 * np.hypot(center - np.log(alone.low), reach)


@given(TIMES)
def test_one_repeat_is_as_before(times: list[float]) -> None:
    assert found_in(np.array([times]), 0.5) == quantile(times, 0.5)


@given(TIMES, st.integers(2, 5))
def test_copies_of_the_same_requests_add_nothing(times: list[float], copies: int) -> None:
    once = known(quantile(times, 0.5).interval)
    again = known(found_in(np.array([times] * copies), 0.5).interval)
    assert (again.low, again.high) == pytest.approx((once.low, once.high))


@given(TIMES, TIMES, st.randoms())
def test_order_does_not_matter_and_the_median_is_inside(
    first: list[float], second: list[float], random: Random
) -> None:
    """Repeats need not have the same requests: the second lacks some, or has more."""
    requests = [
        (time, row, repeat)
        for repeat, times in enumerate((first, second))
        for row, time in enumerate(times)
    ]
    times, rows, repeats = zip(*requests, strict=True)
    one = quantile(times, 0.5, rows, repeats)
    times, rows, repeats = zip(*random.sample(requests, len(requests)), strict=True)
    other = quantile(times, 0.5, rows, repeats)
    assert one.value == other.value
    ends, others = known(one.interval), known(other.interval)
    assert (ends.low, ends.high) == pytest.approx((others.low, others.high))
    assert ends.low * (1 - 1e-9) <= known(one.value) <= ends.high * (1 + 1e-9)


def test_ends_that_nothing_encloses_are_none() -> None:
    """40 requests four times do not have a p99, however often they are served."""
    times = np.tile(np.arange(1.0, 41.0), (4, 1))
    found = found_in(times, 0.99)
    assert found.value is not None
    assert found.interval is None
    assert found_in(times[:, :20], 0.99).value is None
    assert found_in(np.zeros((2, 20)), 0.5).interval is None, "0 is no time"
