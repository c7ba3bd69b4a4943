"""What a page says of predictions beside measurements."""

import pytest

from picbench.experiments.profile_check import CheckedFigure, CheckVerdict, summarise_figures


def figure(
    measured: list[float],
    predicted: float,
    slowness: float = 1.0,
    within: tuple[float, float] | None = None,
    *,
    rate: bool = False,
) -> CheckedFigure:
    slow = [slowness] * len(measured)
    return CheckedFigure(
        "t", "mepic", "TTFT, s", measured, predicted, True, slow, rate=rate, within=within
    )


@pytest.mark.parametrize(
    ("measured", "predicted", "slowness", "verdict"),
    [
        ([9.0, 10.0, 30.0], 11.5, 1.0, CheckVerdict.HOLDS),
        ([9.0, 10.0, 30.0], 11.6, 1.0, CheckVerdict.FAILS),
        ([20.0], 10.0, 2.0, CheckVerdict.AT_SPEED),
        ([20.0], 30.0, 2.0, CheckVerdict.FAILS),
    ],
)
def test_a_prediction_holds_for_the_median_or_at_the_grids_speed(
    measured: list[float], predicted: float, slowness: float, verdict: CheckVerdict
) -> None:
    assert figure(measured, predicted, slowness).verdict is verdict


def test_a_slow_machine_answers_fewer_requests() -> None:
    found = figure([10.0], 20.0, 2.0, rate=True)
    assert found.error == 1.0
    assert found.error_at_speed == 0.0


@pytest.mark.parametrize(
    ("within", "inside"), [((9.0, 11.0), True), ((10.1, 11.0), False), (None, True)]
)
def test_the_median_is_held_against_the_range(
    within: tuple[float, float] | None, inside: bool
) -> None:
    assert figure([5.0, 10.0, 50.0], 10.0, within=within).in_range is inside


def test_a_summary_counts_what_holds() -> None:
    good, slow = figure([10.0], 10.0, 1.0, (9.0, 11.0)), figure([20.0], 10.0, 2.0, (9.0, 11.0))
    assert summarise_figures([good, slow]) == (
        "TTFT, s: 1 of 2 within 15% (2 at the grid's speed), 1 in the predicted range, "
        "median error 25%, worst 50%"
    )
