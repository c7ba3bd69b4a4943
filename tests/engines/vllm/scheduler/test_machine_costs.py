"""Costs that an engine begins with, and how requests correct them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.costs import RequestSize
from picbench.engines.model_config import read_model_config
from picbench.engines.vllm.scheduler.machine_costs import MEASURED, MachineCosts, ModelShape
from picbench.profile.predictor import PACKAGED, GridPredictor, read_grid
from picbench.workloads import models

GRIDS = {"cpu": "cpu-testbed", "cuda": "h200-llama-3.1-8b"}


@pytest.mark.parametrize("device", GRIDS)
def test_engines_begin_with_what_the_packaged_grids_say(device: str) -> None:
    predictor = GridPredictor(read_grid(PACKAGED[GRIDS[device]]))
    kinds = [predictor._kinds[linked] for linked in (False, True)]
    models = *(kind.ttft for kind in kinds), *(kind.seconds for kind in kinds)
    for costs, fitted in zip(MEASURED[device][1], models, strict=True):
        assert fitted is not None
        assert costs == pytest.approx(fitted.costs[: len(costs)], rel=0.01, abs=1e-9)


def test_the_measured_models_have_these_shapes() -> None:
    for device, model in (("cpu", "testbed"), ("cuda", "shape:llama-3.1-8b")):
        config = read_model_config(str(models.resolve(model).path))
        assert ModelShape.of(config) == MEASURED[device][0]
        half = ModelShape.of(config, ranks=2)
        assert half.weights == MEASURED[device][0].weights / 2
        assert half.layers == MEASURED[device][0].layers


SIZE = RequestSize(2000, 1500, 500, 4, 250, 1)


@pytest.mark.parametrize("device", GRIDS)
def test_a_larger_model_takes_longer(device: str) -> None:
    shape = MEASURED[device][0]
    known = MachineCosts(device, shape, 0).first_token(SIZE)
    double = MachineCosts(device, ModelShape(*(2 * n for n in shape)), 0).first_token(SIZE)
    assert known < double < 2 * known


@given(st.lists(st.tuples(st.floats(1e-6, 1e3), st.booleans()), max_size=50))
def test_costs_stay_positive_and_bounded(steps: list[tuple[float, bool]]) -> None:
    costs = MachineCosts("cpu", MEASURED["cpu"][0], 0)
    before = {linked: costs.of(linked=linked) for linked in (False, True)}
    for seconds, linked in steps:
        costs.correct(SIZE.first_token(0), seconds, linked=linked)
    for linked, known in before.items():
        pairs = list(zip(costs.of(linked=linked), known, strict=True))
        assert all(old / 256.1 <= new <= 256.1 * old for new, old in pairs)


@pytest.mark.parametrize("linked", [False, True])
def test_steps_correct_what_they_have_most_of(linked: bool) -> None:
    costs = MachineCosts("cpu", MEASURED["cpu"][0], 0)
    sizes = [RequestSize(n, n, 0, 4 * linked, 0, 1) for n in (100, 400, 1600)]
    # This machine computes tokens at half of the speed, and does all else as fast.
    truth = [2.0 if factor == 1 else 1.0 for factor in range(10)]

    def seconds(size: RequestSize) -> float:
        known = MEASURED["cpu"][1][linked]
        factors = size.first_token(0)
        return sum(c * t * f for c, t, f in zip(known, truth, factors, strict=True))

    for _ in range(1500):
        for size in sizes:
            costs.correct(size.first_token(0), seconds(size), linked=linked)
    for size in sizes:
        assert costs.first_token(size) == pytest.approx(seconds(size), rel=0.05)
    # The other kind of requests computes on the same machine.
    other = costs.of(linked=not linked)
    assert other[1] > 1.2 * MEASURED["cpu"][1][not linked][1]


def test_one_step_that_was_disturbed_changes_little() -> None:
    costs: Any = MachineCosts("cpu", MEASURED["cpu"][0], 0)
    before = costs.first_token(SIZE)
    costs.correct(SIZE.first_token(0), 100.0, linked=True)
    assert costs.first_token(SIZE) < 1.5 * before
    costs.correct(SIZE.first_token(0), 0.0, linked=True)
    assert costs.first_token(SIZE) < 1.5 * before
