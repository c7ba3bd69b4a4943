"""What becomes of the controls: each can fail."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from measured_arms import make_arm, noisy

from picbench.compare.arm import MeasuredArm
from picbench.experiments.controls import AGAIN, UNREPAIRED, WRONG, judge_controls

COUNT = 40


def arms() -> dict[str, MeasuredArm]:
    """Arms as a sound harness measures them."""
    full = make_arm("full", [1.0] * COUNT)
    return {
        "full": noisy(full, 1),
        AGAIN: noisy(replace(full, name=AGAIN), 2),
        UNREPAIRED: noisy(make_arm(UNREPAIRED, [0.0] * 18 + [1.0] * 22), 3),
        WRONG: noisy(make_arm(WRONG, [1.0] * 2 + [0.0] * 38), 4),
    }


def failed(found: Mapping[str, MeasuredArm]) -> list[str]:
    return [control.name for control in judge_controls(found, seeds=5) if not control.passed]


def test_a_sound_harness_passes() -> None:
    assert failed(arms()) == []


@pytest.mark.parametrize(
    ("arm", "scores", "control"),
    [
        (UNREPAIRED, [1.0] * COUNT, "naive loses"),
        (UNREPAIRED, [0.0] * 4 + [1.0] * 36, "naive loses"),
        (UNREPAIRED, [None] * COUNT, "naive loses"),
        (WRONG, [1.0] * 10 + [0.0] * 30, "the KV of other chunks"),
        (WRONG, [None] * COUNT, "the KV of other chunks"),
        (AGAIN, [0.0] * 10 + [1.0] * 30, "full against itself"),
    ],
)
def test_a_harness_that_does_not_notice_fails(
    arm: str, scores: list[float | None], control: str
) -> None:
    measured = arms()
    assert control in failed({**measured, arm: replace(measured[arm], scores=tuple(scores))})


def test_an_arm_that_is_slower_than_itself_fails() -> None:
    measured = arms()
    slow = noisy(replace(measured["full"], name=AGAIN), 5, factor=1.1)
    assert failed({**measured, AGAIN: slow}) == ["full against itself"]


def test_a_model_that_cannot_answer_has_nothing_to_lose() -> None:
    measured = arms()
    unable = tuple([0.0] * COUNT)
    assert "full answers" in failed({**measured, "full": replace(measured["full"], scores=unable)})
