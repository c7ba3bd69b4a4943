"""Sample sizes, checked by drawing as many samples."""

import numpy as np
import pytest

from picbench.compare.significance import (
    Loss,
    judge_loss,
    paired_difference,
    samples_for_width,
    samples_to_decide,
    samples_to_judge,
)


def test_so_many_samples_do_decide() -> None:
    """About 80 % of 200 experiments of the size that a pilot asks for."""
    rng = np.random.default_rng(4)
    pilot = paired_difference([0.0] * 400, rng.normal(0, 0.2, 400).tolist())
    least = samples_to_decide(pilot, 0.05)
    assert least == pytest.approx((1.645 + 0.842) ** 2 * 0.2**2 / 0.05**2, rel=0.15)
    needed = samples_to_judge(pilot, 0.05)
    assert needed is not None
    assert needed > least
    decided = 0
    for trial in range(200):
        drawn = paired_difference([0.0] * needed, rng.normal(0, 0.2, needed).tolist(), seed=trial)
        decided += judge_loss(drawn, 0.05) is Loss.WITHIN
    assert 0.7 <= decided / 200 <= 0.95


def test_a_loss_of_exactly_the_margin_is_never_decided() -> None:
    pilot = paired_difference([1.0] * 10, [0.5] * 4 + [1.0] * 6)
    assert samples_to_judge(pilot, 0.2) is None
    assert samples_to_judge(paired_difference([1.0] * 4, [1.0] * 4), 0.2) is None


def test_half_the_distance_needs_four_times_the_samples() -> None:
    pilot = paired_difference([0.0] * 50, [0.0, 1.0] * 25)
    far, near = samples_to_decide(pilot, 0.2), samples_to_decide(pilot, 0.1)
    assert far is not None
    assert near == pytest.approx(4 * far, rel=0.02)


def test_a_width_has_its_size() -> None:
    pilot = paired_difference([0.0] * 400, np.random.default_rng(0).normal(0, 1, 400).tolist())
    assert samples_for_width(pilot, 0.1) == pytest.approx(1.96**2 / 0.1**2, rel=0.15)


def test_what_did_not_vary_has_no_size() -> None:
    same = paired_difference([1.0, 1.0], [1.0, 1.0])
    assert samples_to_decide(same, 0.01) is None
    assert samples_for_width(same, 0.01) is None


def test_no_size_decides_about_nothing() -> None:
    with pytest.raises(ValueError, match="distance of 0"):
        samples_to_decide(paired_difference([0.0, 0.0], [0.0, 1.0]), 0.0)
