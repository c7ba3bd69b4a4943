"""Where numbers come from."""

import json
from pathlib import Path

import pytest

from picbench import provenance


def test_everything_is_json_and_no_secret_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("VLLM_API_KEY", "vllm_secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    text = json.dumps(provenance.collect())
    assert "secret" not in text
    assert json.loads(text)["environment"]["OMP_NUM_THREADS"] == "2"


def test_a_folder_outside_any_checkout_has_no_commit(tmp_path: Path) -> None:
    assert provenance.git_state(tmp_path) is None


def test_a_missing_folder_has_no_commit(tmp_path: Path) -> None:
    assert provenance.git_state(tmp_path / "gone") is None


def test_the_processor_has_a_name() -> None:
    assert provenance.cpu_model()
