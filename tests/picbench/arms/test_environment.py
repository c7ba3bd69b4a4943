import os

import pytest

from picbench.store.provenance import arm_environment, collect


def test_threads_wait_asleep_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_WAIT_POLICY")
    assert arm_environment()["OMP_WAIT_POLICY"] == "passive"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert arm_environment()["OMP_WAIT_POLICY"] == "active"


@pytest.mark.parametrize(("count", "found"), [(1, "0"), (2, "0"), (3, None), (64, None)])
def test_threads_do_not_spin_for_each_other_on_few_cores(
    monkeypatch: pytest.MonkeyPatch, count: int, found: str | None
):
    monkeypatch.delenv("VLLM_CPU_ATTN_SPLIT_KV", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)), raising=False)
    assert arm_environment().get("VLLM_CPU_ATTN_SPLIT_KV") == found
    monkeypatch.setenv("VLLM_CPU_ATTN_SPLIT_KV", "1")
    assert arm_environment()["VLLM_CPU_ATTN_SPLIT_KV"] == "1"


def test_files_are_utf_8_in_every_locale(monkeypatch: pytest.MonkeyPatch):
    """torch reads its own files as the locale says, and has some that are no EUC-JP."""
    monkeypatch.delenv("PYTHONUTF8", raising=False)
    assert arm_environment()["PYTHONUTF8"] == "1"
    monkeypatch.setenv("PYTHONUTF8", "0")
    assert arm_environment()["PYTHONUTF8"] == "0"


def test_what_arms_get_is_recorded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_WAIT_POLICY")
    assert collect()["environment"]["OMP_WAIT_POLICY"] == "passive"
