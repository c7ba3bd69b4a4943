"""Paired differences, what tests of them say, and what several are worth together."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured_arms import known
from scipy import stats  # type: ignore[import-untyped]

from picbench.statistics.intervals import Interval, StudentMean, sum_clusters
from picbench.statistics.significance import (
    LINKED,
    SAME,
    Loss,
    Paired,
    clusters_without_loss,
    holm,
    judge_loss,
    nondeterminism,
    paired_ratio,
    paired_scores,
    samples_for_width,
    samples_to_judge,
    sign_flip,
)

P_VALUES = st.lists(st.floats(0, 1), min_size=1, max_size=8)


@given(st.lists(st.integers(-20, 20), min_size=1, max_size=8))
def test_few_clusters_are_enumerated(values: list[int]) -> None:
    signed = [v for v in values if v]
    totals = [
        sum(s * v for s, v in zip(ss, signed, strict=True))
        for ss in product((1, -1), repeat=len(signed))
    ]
    expected = sum(abs(t) >= abs(sum(values)) for t in totals) / len(totals)
    assert sign_flip(sum_clusters(np.array(values, dtype=float))) == pytest.approx(expected)


def test_many_clusters_are_sampled_as_scipy_does() -> None:
    values = np.random.default_rng(2).normal(0.12, 1.0, 200)
    reference = stats.permutation_test(
        (values,),
        np.mean,
        permutation_type="samples",
        n_resamples=9999,
        rng=np.random.default_rng(3),
    )
    found = sign_flip(sum_clusters(values), seed=1)
    assert found == pytest.approx(reference.pvalue, abs=0.02)


def test_false_alarms_are_as_rare_as_promised() -> None:
    """Of 500 comparisons without a difference about 5 % have p <= 0.05, clusters or not."""
    rng = np.random.default_rng(7)
    alarms = 0
    for trial in range(500):
        values = np.repeat(rng.standard_t(3, size=25), 4) + rng.normal(size=100)
        names = np.repeat(np.arange(25), 4).tolist()
        alarms += sign_flip(sum_clusters(values, names), trial, 499) <= 0.05
    assert 0.02 <= alarms / 500 <= 0.08


def test_holm_steps_down() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@given(P_VALUES)
def test_holm_keeps_the_order_and_raises_every_p(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    assert all(p <= a <= 1 for p, a in zip(p_values, adjusted, strict=True))
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    assert [adjusted[i] for i in order] == sorted(adjusted)


TIMES = st.lists(st.tuples(*[st.floats(0.1, 100)] * 2), min_size=2, max_size=20)


def test_a_difference_counts_and_measures() -> None:
    found = paired_scores([0.0, 1.0, 1.0, 0.5], [1.0, 1.0, 0.0, 0.75])
    assert found.value == pytest.approx(0.0625)
    assert (found.higher, found.equal, found.lower) == (2, 1, 1)
    assert (found.pairs, found.clusters) == (4, 4)
    assert found.exact_p is None


def test_scores_of_0_and_1_get_mcnemars_p() -> None:
    before, after = [1.0] * 20, [0.0] * 6 + [1.0] * 14
    found = paired_scores(before, after)
    assert found.exact_p == pytest.approx(2 / 2**6)
    assert found.p == pytest.approx(2 / 2**6)
    assert paired_scores(before, before).exact_p == 1
    assert paired_scores([0.0, 1.0], [1.0, 0.0]).exact_p == pytest.approx(1)
    # On the same requests it does not matter what they share.
    for clusters in (["a", "b"] * 10, ["a"] * 20):
        assert paired_scores(before, after, clusters).exact_p == pytest.approx(2 / 2**6)


def test_what_is_asked_again_says_nothing_new() -> None:
    """Three repeats of six lost answers are six, with or without an exact p."""
    names = [*range(20)] * 3
    found = paired_scores([1.0] * 60, ([0.0] * 6 + [1.0] * 14) * 3, names, requests=names)
    assert found.p == pytest.approx(2 / 2**6)
    assert found.exact_p is None


def test_no_random_flips_are_as_extreme_as_none() -> None:
    """Of 9999 random assignments of 40 signs none is all positive; p is not 0 for that."""
    assert sign_flip(sum_clusters(np.linspace(1, 2, 40))) == 1 / 10_000


def test_a_constant_slowdown_is_measured_exactly() -> None:
    found = paired_ratio([1.0, 2.0, 40.0], [1.05, 2.1, 42.0])
    assert found.value == pytest.approx(1.05)
    ends = known(found.interval)
    assert (ends.low, ends.high) == pytest.approx((1.05, 1.05))
    assert found.standard_error == pytest.approx(0, abs=1e-12)


@given(TIMES)
def test_a_ratio_the_other_way_round_is_its_inverse(times: list[tuple[float, float]]) -> None:
    before, after = zip(*times, strict=True)
    there, back = paired_ratio(before, after), paired_ratio(after, before)
    assert there.value * back.value == pytest.approx(1)
    assert (there.higher, there.lower) == (back.lower, back.higher)
    assert there.p == pytest.approx(back.p, abs=0.02)


def test_no_interval_of_scores_leaves_what_scores_can_differ_by() -> None:
    """Student's t of four samples reaches to 1.55 here, and 1 is the most that can be won."""
    lost, won = [0.0] * 4, [1.0, 1.0, 1.0, 0.0]
    ends, other = (
        known(found.interval) for found in (paired_scores(lost, won), paired_scores(won, lost))
    )
    assert known(StudentMean.of(sum_clusters(np.array(won))).interval()).high > 1
    assert -1 < ends.low < 0.75 < ends.high < 1
    assert (other.low, other.high) == pytest.approx((-ends.high, -ends.low))


@pytest.mark.parametrize(("lost", "won"), [(3, 0), (5, 0), (6, 0), (9, 2), (10, 2), (13, 0)])
def test_intervals_of_answers_leave_out_0_where_mcnemars_p_says_so(lost: int, won: int) -> None:
    change = flips(200, lost, won)
    assert (known(change.interval).high < 0) == (known(change.exact_p) < 0.05)


def test_one_cluster_is_one_observation() -> None:
    found = paired_scores([0.0, 0.0], [1.0, 1.0], ["a", "a"])
    assert found.interval is None
    assert found.p_others is None
    assert found.unknown == LINKED
    assert found.p == 0.5, "of the same two requests"
    assert found.standard_error == 0.0
    assert paired_ratio([1.0, 1.0], [2.0, 2.0], ["a", "a"]).p is None


def test_one_set_of_documents_tells_nothing_of_others() -> None:
    """Whether its questions are called one cluster or many."""
    before, after = [1.0] * 20, [0.0] * 10 + [1.0] * 10
    for names in (["a"] * 20, [*range(20)]):
        found = paired_scores(before, after, names, documents=[{"a", "b"}] * 20)
        assert (found.unknown, found.interval, found.p_others) == (SAME, None, None)
        assert known(found.p) < 0.01


def test_requests_without_documents_are_their_own() -> None:
    found = paired_scores([1.0] * 20, [0.0] * 10 + [1.0] * 10, documents=[set()] * 20)
    assert found.unknown is None
    assert found.interval is not None


@pytest.mark.parametrize(("share", "wide"), [(0.0, 1.0), (0.5, 1.0), (1.0, 1.7)])
def test_crossing_covers_what_documents_do(share: float, wide: float) -> None:
    """Four of 40 documents a question; the rows alone cover far too rarely where these matter."""
    rng, covered, widths = np.random.default_rng(5), 0, []
    for _ in range(200):
        sets = [set(rng.choice(40, 4, replace=False).tolist()) for _ in range(60)]
        effects = rng.normal(0, share * 0.1 * 2, 40)
        change = [rng.normal(0, 0.1) + np.mean([effects[d] for d in own]) for own in sets]
        found = paired_scores([0.0] * 60, change, ["all"] * 60, documents=sets)
        assert found.clusters < 60
        covered += 0.0 in known(found.interval)
        widths.append(found.standard_error / (np.std(change) / np.sqrt(60)))
    assert covered / 200 >= 0.93
    assert np.mean(widths) > wide


def test_what_did_not_vary_is_not_known_of_other_documents() -> None:
    sets = [{n % 5, n % 7} for n in range(20)]
    assert paired_scores([1.0] * 20, [1.0] * 20, ["a"] * 20, documents=sets).unknown == LINKED


def test_unpaired_and_impossible_values_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be paired"):
        paired_scores([1.0], [1.0, 2.0])
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


def flips(total: int, lost: int, won: int = 0) -> Paired:
    """`total` right answers, of which some are lost, and wrong ones that are won."""
    after = [0.0] * lost + [1.0] * (total - lost)
    return paired_scores([1.0] * total + [0.0] * won, [*after, *[1.0] * won])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (flips(1000, 0), Loss.WITHIN),
        (flips(299, 0), Loss.WITHIN),
        (flips(298, 0), Loss.UNKNOWN),
        (flips(1000, 3), Loss.WITHIN),
        (flips(1000, 60), Loss.BEYOND),
        (flips(50, 1), Loss.UNKNOWN),
        (flips(1000, 0, won=40), Loss.WITHIN),
        (flips(13, 0, won=1), Loss.UNKNOWN),
        (flips(229, 0, won=1), Loss.UNKNOWN),
        (flips(297, 0, won=1), Loss.WITHIN),
        (flips(2, 2), Loss.UNKNOWN),
        (flips(100, 100), Loss.BEYOND),
    ],
)
def test_a_loss_is_within_beyond_or_unknown(change: Paired, expected: Loss) -> None:
    assert judge_loss(change, 0.01) is expected


def test_a_sure_loss_may_be_within_the_margin() -> None:
    change = flips(100, 8)
    assert known(change.one_sided).high < 0
    assert judge_loss(change, 0.08) is Loss.UNKNOWN


def test_no_interval_overrules_its_own_p() -> None:
    """Three of 200 lost have p = 0.25, whatever the bounds of their mean are."""
    change = replace(flips(200, 3), one_sided=Interval(-0.05, -0.03, 0.9))
    assert change.p == 0.25
    assert judge_loss(change, 0.001) is Loss.UNKNOWN


def test_a_loss_of_exactly_the_margin_is_rarely_called_small() -> None:
    """At most about 5 % of 300 experiments in which it is not below the margin."""
    rng = np.random.default_rng(11)
    calls = 0
    for trial in range(300):
        changes = rng.normal(-0.05, 0.3, 80)
        found = paired_scores([0.0] * 80, changes.tolist(), seed=trial)
        calls += judge_loss(found, 0.05) is Loss.WITHIN
    assert calls / 300 <= 0.088


@pytest.mark.parametrize(
    ("samples", "won", "margin"),
    [(2, 0.45, 0.05), (5, 0.3, 0.01), (14, 0.05, 0.01), (20, 0.1, 0.05)],
)
def test_neither_verdict_is_wrong_too_often(samples: int, won: float, margin: float) -> None:
    """Answers right or wrong, a loss of exactly the margin: all that can happen, by its chance."""
    lost, within, beyond = won + margin, 0.0, 0.0
    for wins in range(samples + 1):
        for losses in range(samples + 1 - wins):
            same = samples - wins - losses
            chance = stats.multinomial.pmf(
                [wins, losses, same], samples, [won, lost, 1 - won - lost]
            )
            if chance > 1e-4:
                found = judge_loss(flips(losses + same, losses, wins), margin)
                within += chance * (found is Loss.WITHIN)
                beyond += chance * (found is Loss.BEYOND)
    assert max(within, beyond) < 0.06


def test_the_whole_score_is_a_margin_too() -> None:
    assert clusters_without_loss(1.0) == 1
    assert judge_loss(flips(2, 0), 1.0) is Loss.WITHIN


def test_one_cluster_says_nothing() -> None:
    assert judge_loss(paired_scores([1.0, 1.0], [1.0, 1.0], [0, 0]), 0.5) is Loss.UNKNOWN


@pytest.mark.parametrize("small", [0.001, 0.02, 0.5])
def test_a_small_loss_does_not_hide_what_may_go_unseen(small: float) -> None:
    """Of 40 samples none lost: who knows. One that lost a word of 50 makes nothing better."""
    before = [1.0] * 40
    assert judge_loss(paired_scores(before, before), 0.01) is Loss.UNKNOWN
    found = paired_scores(before, [1 - small, *before[1:]])
    assert judge_loss(found, 0.01) is Loss.UNKNOWN


@pytest.mark.parametrize("samples", [15, 30, 100])
def test_losses_among_small_changes_are_rarely_called_small(samples: int) -> None:
    """A fiftieth loses all, twice the margin, and a fifth changes by a word."""
    rng, within = np.random.default_rng(samples), 0
    for trial in range(200):
        change = np.where(rng.random(samples) < 0.2, rng.choice([-0.02, 0.02], samples), 0.0)
        change = np.where(rng.random(samples) < 0.02, -0.5, change)
        before = np.full(samples, 0.5)
        found = paired_scores(before.tolist(), (before + change).tolist(), seed=trial)
        within += judge_loss(found, 0.005) is Loss.WITHIN
    assert within / 200 <= 0.05


def test_so_many_samples_do_decide() -> None:
    """About 80 % of 200 experiments of the size that a pilot asks for."""
    rng = np.random.default_rng(4)
    pilot = paired_scores([0.0] * 400, rng.normal(0, 0.2, 400).tolist())
    needed = known(samples_to_judge(pilot, 0.05))
    # What may go unseen is more than nothing.
    assert needed > 0.85 * (1.645 + 0.842) ** 2 * 0.2**2 / 0.05**2
    decided = 0
    for trial in range(200):
        drawn = paired_scores([0.0] * needed, rng.normal(0, 0.2, needed).tolist(), seed=trial)
        decided += judge_loss(drawn, 0.05) is Loss.WITHIN
    assert 0.7 <= decided / 200 <= 0.95


@pytest.mark.parametrize("clusters", [2, 4, 40])
def test_no_more_samples_are_asked_for_than_decide(clusters: int) -> None:
    """A guess that is just short of the number is not answered by one that is far beyond it."""
    changes = [-1.0 if n % 40 < 15 or n == 39 else 0.0 for n in range(80)]
    pilot = paired_scores([0.0] * 80, changes, [n % clusters for n in range(80)])
    needed, distance = known(samples_to_judge(pilot, 0.02)), abs(pilot.value + 0.02)
    # One cluster that nobody saw, and the error by which 80 % are sure.
    assert needed < 1.2 * pilot.pairs * (
        (2.5 * pilot.standard_error / distance) ** 2 + 2.7 / (clusters * distance)
    )


def test_a_loss_of_exactly_the_margin_is_never_decided() -> None:
    pilot = paired_scores([1.0] * 10, [0.5] * 4 + [1.0] * 6)
    assert samples_to_judge(pilot, 0.2) is None


def test_a_width_has_its_size() -> None:
    pilot = paired_scores([0.0] * 400, np.random.default_rng(0).normal(0, 1, 400).tolist())
    assert samples_for_width(pilot, 0.1) == pytest.approx(1.96**2 / 0.1**2, rel=0.15)


def test_what_did_not_vary_has_no_size() -> None:
    same = paired_scores([1.0, 1.0], [1.0, 1.0])
    assert samples_to_judge(same, 0.01) is None
    assert samples_for_width(same, 0.01) is None


def test_answers_are_compared_by_sample() -> None:
    found = nondeterminism({"a": "1", "b": "2", "c": "3"}, {"b": "2", "a": "9", "d": "4"})
    assert (found.pairs, found.differing) == (2, 1)
    assert found.interval is not None
    assert 0.0 < found.interval.low < 0.5 < found.interval.high < 1.0
    same = {str(i): "x" for i in range(200)}
    # Three divided by n, roughly.
    assert known(nondeterminism(same, same).interval).high == pytest.approx(0.0175, abs=0.0025)
    assert nondeterminism({"a": "1"}, {"b": "1"}).interval is None
