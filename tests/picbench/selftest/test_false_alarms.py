"""Comparisons of an arm with itself, with the noise of a real run."""

import pytest
from measured_noise import AGAIN, measured

from picbench.compare.arm import MeasuredArm
from picbench.experiments import controls as module
from picbench.experiments.controls import false_alarms


def twice() -> tuple[MeasuredArm, MeasuredArm]:
    """The arm full and the arm full, of one run."""
    return measured().arms["full"].measured("full"), measured().arms[AGAIN].measured(AGAIN)


def test_at_most_5_of_100_comparisons_over_200_requests_alarm() -> None:
    assert false_alarms(*twice(), seeds=100, requests=200) <= 5


@pytest.mark.parametrize(("alpha", "alarms"), [(0.0, 0), (1.1, 3)])
def test_alarms_are_counted(monkeypatch: pytest.MonkeyPatch, alpha: float, alarms: int) -> None:
    monkeypatch.setattr(module, "ALPHA", alpha)
    assert false_alarms(*twice(), seeds=3, requests=20) == alarms
