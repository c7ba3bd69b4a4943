"""Costs that are fitted, and how far they can be trusted."""

from random import Random

import pytest

from picbench.profile.prediction.cost_model import (
    Observation,
    RequestShape,
    fit,
    leave_one_out,
)

COSTS = (0.02, 0.025, 0.001, 0.0, 0.0005, 0.004)


def observed(count: int, noise: float = 0.0) -> list[Observation]:
    source = Random(4)
    found = []
    for number in range(count):
        prompt = source.uniform(500, 20_000)
        shape = RequestShape(
            prompt, prompt * source.random(), source.randint(1, 40), source.choice((4, 64))
        )
        value = sum(cost * x for cost, x in zip(COSTS, shape.costs(), strict=True))
        found.append(Observation(number, shape, value * (1 + source.gauss(0, noise))))
    return found


def test_known_costs_are_found() -> None:
    model = fit(observed(30))
    assert model is not None
    assert model.costs == pytest.approx(COSTS, abs=1e-6)
    inside = RequestShape(5000, 3000, 10, 16)
    assert model.covers(inside)
    assert not model.covers(RequestShape(50_000, 3000, 10, 16))
    assert not model.covers(RequestShape(5000, 3000, 100, 16))


def test_errors_of_points_that_are_left_out() -> None:
    exact, noisy = leave_one_out([observed(30)]), leave_one_out([observed(30, 0.1)])
    assert exact is not None
    assert noisy is not None
    assert exact.p90 < 1e-6
    assert 0.02 < noisy.median < 0.2
    assert noisy.points == 30
    assert "30 points" in str(noisy)


def test_too_few_points_predict_nothing() -> None:
    assert fit(observed(7)) is None
    assert leave_one_out([observed(8)]) is None
    assert fit([]) is None


def test_repeats_of_one_point_are_left_out_together() -> None:
    points = observed(20)
    wrong = [Observation("same", point.shape, point.value * 3) for point in points[:2]]
    found = leave_one_out([[*points, *wrong]])
    assert found is not None
    # Of 22 observations the two wrong ones make one group, which is not within 15 %.
    assert found.points == 21
    assert found.within <= 20 / 22
