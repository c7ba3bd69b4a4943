"""What the plug-in does in each of vLLM's processes before a model is made there."""

import pytest

from picbench.engines.vllm.frontend import plugin


def test_elementary_functions_are_called_before_a_model_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[str] = []
    for name in ("check_version", "settle_first_calls", "defer_hashing"):
        monkeypatch.setattr(plugin, name, lambda name=name: called.append(name))
    plugin.register()
    assert called == ["check_version", "settle_first_calls", "defer_hashing"]
