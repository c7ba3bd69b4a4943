"""Sign flips, McNemar and Holm, against enumeration, scipy and known values."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats  # type: ignore[import-untyped]

from picbench.compare.intervals import sum_clusters
from picbench.compare.significance import holm, mcnemar, sign_flip

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


def test_no_difference_is_never_significant() -> None:
    assert sign_flip(sum_clusters(np.zeros(30))) == 1.0


def test_false_alarms_are_as_rare_as_promised() -> None:
    """Of 500 comparisons without a difference about 5 % have p <= 0.05, clusters or not."""
    rng = np.random.default_rng(7)
    alarms = 0
    for trial in range(500):
        values = np.repeat(rng.standard_t(3, size=25), 4) + rng.normal(size=100)
        names = np.repeat(np.arange(25), 4).tolist()
        alarms += sign_flip(sum_clusters(values, names), trial, 499) <= 0.05
    assert 0.02 <= alarms / 500 <= 0.08


@given(st.lists(st.integers(-9, 9).map(float), min_size=1, max_size=30))
def test_a_sign_test_has_no_direction(values: list[float]) -> None:
    array = np.array(values)
    assert sign_flip(sum_clusters(array), 0, 199) == sign_flip(sum_clusters(-array), 0, 199)


@given(st.integers(0, 40), st.integers(0, 40))
def test_mcnemar_is_symmetric_and_a_probability(wins: int, losses: int) -> None:
    assert 0 < mcnemar(wins, losses) <= 1
    assert mcnemar(wins, losses) == pytest.approx(mcnemar(losses, wins))


def test_mcnemar_counts_discordant_answers_only() -> None:
    assert mcnemar(0, 6) == pytest.approx(2 / 2**6)
    assert mcnemar(5, 5) == pytest.approx(1)
    assert mcnemar(0, 0) == 1


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


@given(P_VALUES)
def test_holm_never_exceeds_bonferroni(p_values: list[float]) -> None:
    pairs = zip(p_values, holm(p_values), strict=True)
    assert all(a <= min(1, len(p_values) * p) + 1e-12 for p, a in pairs)
