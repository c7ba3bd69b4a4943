"""Costs that are fitted, and how far they can be trusted."""

from dataclasses import replace
from random import Random

import pytest

from picbench.profile.costs import Observation, RequestSize, fit, leave_one_out

COSTS = (0.02, 0.025, 0.001, 0.0, 0.0005, 0.004)


def observed(count: int, noise: float = 0.0) -> list[Observation]:
    source = Random(4)
    found = []
    for number in range(count):
        prompt = source.uniform(500, 20_000)
        computed = prompt * source.random()
        chunks = source.randint(1, 40)
        compiled = computed * source.random()
        size = RequestSize(prompt, computed, compiled, chunks, prompt / chunks, 4)
        counts = size.prefill()
        value = sum(cost * x for cost, x in zip(COSTS, counts, strict=True))
        value *= 1 + source.gauss(0, noise)
        found.append(Observation(number, counts, value, (prompt, computed, chunks)))
    return found


def test_known_costs_are_found() -> None:
    model = fit(observed(30))
    assert model is not None
    assert model.costs == pytest.approx(COSTS, abs=1e-6)
    assert model.covers((5000, 3000, 10))
    assert not model.covers((50_000, 3000, 10))
    assert not model.covers((5000, 3000, 100))


def test_cells_that_were_disturbed_count_little() -> None:
    points = observed(40, 0.02)
    disturbed = [replace(p, value=p.value * (4 if n % 8 == 0 else 1)) for n, p in enumerate(points)]
    clean, found = fit(points), fit(disturbed)
    assert clean is not None
    assert found is not None
    for point in points:
        assert found.predict(point.counts) == pytest.approx(clean.predict(point.counts), rel=0.08)


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


def test_costs_that_nothing_pays_need_no_points() -> None:
    without = [replace(p, counts=(*p.counts[:4], 0.0, 0.0), value=p.value) for p in observed(6)]
    model = fit(without)
    assert model is not None
    assert model.costs[4:] == (0.0, 0.0)


def test_repeats_of_one_point_are_left_out_together() -> None:
    points = observed(20)
    wrong = [replace(point, group="same", value=point.value * 3) for point in points[:2]]
    found = leave_one_out([[*points, *wrong]])
    assert found is not None
    # Of 22 observations the two wrong ones make one group, which is not within 15 %.
    assert found.points == 21
    assert found.within <= 20 / 22
