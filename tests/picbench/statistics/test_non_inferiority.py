"""Losses against a margin."""

import numpy as np
import pytest
from scipy import stats  # type: ignore[import-untyped]

from picbench.compare.significance import (
    Loss,
    Paired,
    clusters_without_loss,
    judge_loss,
    paired_difference,
)


def flips(total: int, lost: int, won: int = 0) -> Paired:
    """`total` right answers, of which some are lost, and wrong ones that are won."""
    after = [0.0] * lost + [1.0] * (total - lost)
    return paired_difference([1.0] * total + [0.0] * won, [*after, *[1.0] * won])


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
        (flips(297, 0, won=1), Loss.UNKNOWN),
        (flips(2, 2), Loss.UNKNOWN),
        (flips(100, 100), Loss.BEYOND),
    ],
)
def test_a_loss_is_within_beyond_or_unknown(change: Paired, expected: Loss) -> None:
    assert judge_loss(change, 0.01) is expected


def test_a_loss_of_exactly_the_margin_is_rarely_called_small() -> None:
    """At most about 5 % of 300 experiments in which it is not below the margin."""
    rng = np.random.default_rng(11)
    calls = 0
    for trial in range(300):
        changes = rng.normal(-0.05, 0.3, 80)
        found = paired_difference([0.0] * 80, changes.tolist(), seed=trial)
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
    assert judge_loss(paired_difference([1.0, 1.0], [1.0, 1.0], [0, 0]), 0.5) is Loss.UNKNOWN


def test_a_margin_is_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        judge_loss(flips(5, 0), 0.0)


@pytest.mark.parametrize("small", [0.001, 0.02, 0.5])
def test_a_small_loss_does_not_hide_what_may_go_unseen(small: float) -> None:
    """Of 40 samples none lost: who knows. One that lost a word of 50 makes nothing better."""
    before = [1.0] * 40
    assert judge_loss(paired_difference(before, before), 0.01) is Loss.UNKNOWN
    found = paired_difference(before, [1 - small, *before[1:]])
    assert judge_loss(found, 0.01) is Loss.UNKNOWN


@pytest.mark.parametrize("samples", [15, 30, 100])
def test_losses_among_small_changes_are_rarely_called_small(samples: int) -> None:
    """A fiftieth loses all, twice the margin, and a fifth changes by a word."""
    rng, within = np.random.default_rng(samples), 0
    for trial in range(200):
        change = np.where(rng.random(samples) < 0.2, rng.choice([-0.02, 0.02], samples), 0.0)
        change = np.where(rng.random(samples) < 0.02, -0.5, change)
        before = np.full(samples, 0.5)
        found = paired_difference(before.tolist(), (before + change).tolist(), seed=trial)
        within += judge_loss(found, 0.005) is Loss.WITHIN
    assert within / 200 <= 0.05
