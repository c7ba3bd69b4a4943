"""`docs/serving.md`: its commands are those that `picbench serve --show-command` prints.

Its requests and refusals are sent to a server by `tests/engines/vllm/test_http.py`.
"""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from serving_document import arguments, refused_at_start, variables

from picbench.engines.vllm.serve import server_command

LLAMA = {
    "dtype": "float32",
    "bos_token_id": 1,
    "max_position_embeddings": 2048,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_commands_are_what_picbench_serve_prints(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "path/to/llama"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "model.safetensors").touch()
    monkeypatch.chdir(tmp_path)
    for name in variables("cpu"):
        monkeypatch.delenv(name, raising=False)
    made = server_command(
        "path/to/llama", "", ["--served-model-name", "llama"], device=device, algorithm="mepic"
    )
    start, found = arguments(device)
    printed = shlex.split(made.shell().replace(" \\\n", " "))
    given = variables(device)
    assert printed[: len(given)] == [f"{name}={value}" for name, value in given.items()]
    if device == "cpu":
        start[0] = sys.executable
    else:
        start.append(found.pop("model"))
    first, *others = printed[len(given) :][: len(start)]
    # The `vllm` beside this Python, where there is one.
    assert [first if device == "cpu" else Path(first).name, *others] == start
    flags = printed[len(given) + len(start) :]
    assert read(flags) == {name: value_of(text) for name, text in found.items()}


def test_what_is_refused_at_startup_is_in_the_commands() -> None:
    for device in ("cuda", "cpu"):
        _, found = arguments(device)
        flags = {flag.split()[0].removeprefix("--") for flag, _ in refused_at_start()}
        assert {flag.removeprefix("no-") for flag in flags} <= found.keys()


def read(words: list[str]) -> dict[str, Any]:
    """Flags with their values."""
    found: dict[str, Any] = {}
    for word in words:
        if word.startswith("--"):
            flag = word.removeprefix("--")
            found[flag] = ""
        else:
            found[flag] = value_of(word)
    return found


def value_of(text: str) -> Any:
    """JSON as it is meant, and other text as it is."""
    return json.loads(text) if text.startswith("{") else text
