"""What `docs/serving.md` tells users to run and to send, and what it says they get."""

import json
import re
import shlex
from itertools import takewhile
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parents[1] / "docs" / "serving.md"

#: vLLM's `vllm serve` takes the model without a flag.
_SERVE = ("vllm", "serve")


def arguments(device: str) -> tuple[list[str], dict[str, str]]:
    """The command that starts a server on a device: its words before flags, and flags with values.

    A flag without a value has "". Environment variables are left out, see `variables`.
    """
    words = _command(device)
    words = words[len(variables(device)) :]
    first = next(i for i, word in enumerate(words) if word.startswith("--"))
    found: dict[str, str] = {}
    for word in words[first:]:
        if word.startswith("--"):
            flag = word.removeprefix("--")
            found[flag] = ""
        else:
            assert not found[flag], f"two values after {flag}"
            found[flag] = word
    command = words[:first]
    if tuple(command[:2]) == _SERVE:
        command, found["model"] = command[:2], command[2]
    return command, found


def variables(device: str) -> dict[str, str]:
    """The environment variables of the command that starts a server on a device."""
    assigned = takewhile(re.compile(r"[A-Z_]+=").match, _command(device))
    return dict(word.split("=", 1) for word in assigned)


def _command(device: str) -> list[str]:
    _, gpu, cpu = (shlex.split(block.replace("\\\n", " ")) for block in _blocks("bash"))
    return {"cuda": gpu, "cpu": cpu}[device]


def bodies() -> tuple[dict[str, Any], dict[str, Any]]:
    """The requests for a completion and for a chat."""
    completion, chat, _ = map(json.loads, _blocks("json"))
    return completion, chat


def with_parts() -> dict[str, Any]:
    """The chat with documents in parts of a message."""
    *_, chat = map(json.loads, _blocks("json"))
    found: dict[str, Any] = chat
    return found


def marked_example() -> str:
    """The program that marks documents."""
    [program] = _blocks("python")
    return program


def told() -> tuple[dict[str, Any], str]:
    """What the completion's answer says of its prompt when it is sent again, and its header."""
    text = DOCUMENT.read_text()
    usage = re.search(r'"pic": (\{"chunk_hit.*?\]\})', text, re.S)
    header = re.search(r"`x-pic: (.*?)`", text)
    assert usage and header
    return json.loads(usage[1]), header[1]


def refused() -> list[tuple[dict[str, Any], str]]:
    """What is put into the completion, and what the answer's reason has."""
    rows = _table("in the request")
    return [(json.loads("{" + change + "}"), reason) for change, reason in rows]


def refused_at_start() -> list[tuple[str, str]]:
    """Flags that contradict picbench, and the line that says so."""
    return _table("flag")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", DOCUMENT.read_text(), re.M | re.S)


def _table(first: str) -> list[tuple[str, str]]:
    """The code in the first two cells of the rows of the table whose first heading is given."""
    _, table = DOCUMENT.read_text().split(f"| {first} |", 1)
    table, _, _ = table.partition("\n\n")
    rows = re.findall(r"^\| `(.+?)` \| `(.+?)` \|", table, re.M)
    assert len(rows) == table.count("\n") - 1, "a row cannot be read"
    return rows
