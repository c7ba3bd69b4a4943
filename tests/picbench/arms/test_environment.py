import pytest

from picbench.arms.environment import arm_environment
from picbench.output.provenance import collect


def test_threads_wait_asleep_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_WAIT_POLICY")
    assert arm_environment()["OMP_WAIT_POLICY"] == "passive"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert arm_environment()["OMP_WAIT_POLICY"] == "active"


def test_what_arms_get_is_recorded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_WAIT_POLICY")
    assert collect()["environment"]["OMP_WAIT_POLICY"] == "passive"
