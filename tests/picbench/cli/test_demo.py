"""`make demo`, shortened: its commands as the Makefile has them, over real engines."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parents[3] / "Makefile"


def variable(name: str) -> list[str]:
    """The words of a variable of the Makefile."""
    [value] = re.findall(rf"^{name} := (.*)$", MAKEFILE.read_text(), re.MULTILINE)
    return shlex.split(value)


def changed(arguments: list[str], **flags: str) -> list[str]:
    """Arguments with other values for some flags that they have."""
    found = list(arguments)
    for flag, value in flags.items():
        found[found.index(f"--{flag}") + 1] = value
    return found


def picbench(*arguments: str) -> str:
    command = [sys.executable, "-m", "picbench", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.engine
def test_the_demo_ends_with_what_reuse_gains(tmp_path: Path) -> None:
    requests, output = str(tmp_path / "demo.jsonl"), tmp_path / "run"
    few = changed(variable("DEMO_TRAFFIC"), requests="2", chunks="8", pool="8")
    facts = picbench("traffic", "--output", requests, *few)
    assert "cached: 1\n" in facts
    arms = changed(variable("DEMO_RUN"), algo="full,mepic")
    shown = picbench("run", "--requests", requests, *arms, "--output", str(output))
    assert re.search(r"^mepic against full: first token in .*, f1 .* \(n=2\)$", shown, re.MULTILINE)
    assert json.loads(shown.splitlines()[-1])["run"] == str(output)


def test_the_demo_compares_what_there_is_today_with_reuse() -> None:
    run = variable("DEMO_RUN")
    assert run[run.index("--algo") + 1] == "full,prefix,naive,mepic"
