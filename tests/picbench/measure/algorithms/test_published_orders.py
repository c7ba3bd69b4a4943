"""Published orders: what holds, fails or is undecided, and between which models."""

from collections.abc import Sequence

import pytest

from picbench.experiments.algorithms_page import ORDERS, PublishedOrder, judge
from picbench.experiments.arm_scores import ArmRows, Case, ScoredPart, arms_of

FULL, CHEAP = ("testbed", "full"), ("testbed", "naive")
ORDER = PublishedOrder("full >= naive", "0000.00000", (FULL, CHEAP))


def part(scores: dict[str, Sequence[float]], model: str = "testbed") -> ScoredPart:
    rows = len(next(iter(scores.values())))
    arms = {arm: ArmRows(list(found), [0] * rows, [0] * rows) for arm, found in scores.items()}
    return ScoredPart(Case(model, "musique"), rows, {}, arms, [10] * rows, [8] * rows)


def verdict(full: Sequence[float], naive: Sequence[float]) -> str:
    found = part({"full": full, "naive": naive})
    [step] = judge(ORDER, {found.case: found})
    return step.verdict


def test_orders_hold_fail_or_are_undecided() -> None:
    half = [1.0, 0.0] * 50
    assert verdict([1.0] * 100, half) == "holds"
    assert verdict(half, half) == "holds"
    assert verdict(half, [1.0] * 100) == "fails"
    assert verdict([*half[:98], 1.0, 0.0], [*half[:98], 0.0, 1.0]) == "undecided"


def test_a_tuned_model_is_compared_with_the_untuned_one() -> None:
    order = PublishedOrder("tuned", "0000.00000", (("testbed:link", "naive"), CHEAP))
    tuned, plain = part({"naive": [1.0] * 9}, "testbed:link"), part({"naive": [0.5] * 9})
    [step] = judge(order, {tuned.case: tuned, plain.case: plain})
    assert (step.difference.value, step.verdict) == (pytest.approx(0.5), "holds")
    assert judge(order, {plain.case: plain}) == []


def test_every_arm_of_an_order_is_measured() -> None:
    for order in ORDERS:
        for model, arm in order.arms:
            assert arm in arms_of(model)
