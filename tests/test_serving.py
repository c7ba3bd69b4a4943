"""`docs/serving.md`: its commands are what `engine_arguments` makes of an engine.

Its requests and refusals are sent to a server by `tests/engines/vllm/test_http.py`.
"""

import json
from dataclasses import asdict
from typing import Any

import pytest
from serving_document import arguments

from picbench.engines.vllm.settings import KEY, PicSettings, engine_arguments

#: Beside the parts of the engine; vLLM needs a compiler on a CPU unless it runs eagerly.
OTHERS = {
    "model": "path/to/llama",
    "served-model-name": "llama",
    "enable-prompt-tokens-details": "",
}
EAGER: dict[str, dict[str, str]] = {"cuda": {}, "cpu": {"enforce-eager": ""}}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_commands_name_the_parts_of_an_engine(device: str) -> None:
    command, found = arguments(device)
    wanted: dict[str, Any] = engine_arguments(PicSettings(), device)
    settings = PicSettings.read(json.loads(found.pop("additional-config")))
    assert settings is not None
    assert wanted.pop("additional_config") == {KEY: asdict(settings.on(device))}
    transfer = wanted.pop("kv_transfer_config")
    given = json.loads(found.pop("kv-transfer-config"))
    assert given == {name: getattr(transfer, name) for name in given}
    assert set(given) >= {"kv_connector", "kv_role", "kv_load_failure_policy"}
    flags = dict(flag(name, value) for name, value in wanted.items())
    assert found == flags | OTHERS | EAGER[device]
    assert command[0] == {"cuda": "vllm", "cpu": "python"}[device]


def flag(name: str, value: object) -> tuple[str, str]:
    """A field of vLLM's `EngineArgs` as a flag and its value, "" for switches."""
    words = name.replace("_", "-")
    if isinstance(value, bool):
        return (words if value else f"no-{words}"), ""
    return words, str(value)
