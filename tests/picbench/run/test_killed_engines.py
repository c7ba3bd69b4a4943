"""A run of real engines that is killed at random moments; `--kills 10` takes many minutes."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from picbench.store.reader import read_run
from picbench.store.writer import BATCHES

COMMAND = ("--algo", "full,prefix,mepic", "--dataset", "musique", "--limit", "24",
           "--max-tokens", "8", "--concurrency", "2", "--device", "cpu", "--dtype", "float32",
           "--quiet")  # fmt: skip
BATCHES_OF_RUN = 3 * 24 // 8


def start(output: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "picbench", "run", *COMMAND, "--output", str(output)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def batches(output: Path) -> int:
    path = output / BATCHES
    return path.read_bytes().count(b"\n") if path.exists() else 0


def measured(output: Path) -> dict[str, Any]:
    """Counters and outputs."""
    run = read_run(output)
    arms = json.loads((output / "summary.json").read_text())["arms"]
    keys = ("requests", "failed", "score", "tokens", "computed_tokens", "output_tokens", "hits",
            "outcomes")  # fmt: skip
    return {
        "rows": [
            (r.arm, r.sample, r.round, r.tokens, r.hits, r.output_sha256, r.text, r.score)
            for r in run.rows
        ],
        "arms": {name: {key: arm[key] for key in keys} for name, arm in arms.items()},
    }


@pytest.mark.engine
def test_kills_change_neither_counters_nor_outputs(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    kills: int = request.config.getoption("--kills")
    if not kills:
        pytest.skip("asked for by --kills")
    draw = random.Random(16)
    killed = tmp_path / "killed"
    for number in range(kills):
        process = start(killed)
        wanted = batches(killed) + draw.randint(0, max(1, BATCHES_OF_RUN // kills))
        while process.poll() is None and batches(killed) < wanted:
            time.sleep(0.01)
        time.sleep(draw.random() * 2)
        process.send_signal(signal.SIGKILL)
        process.wait()
        print(f"kill {number + 1}: {batches(killed)} of {BATCHES_OF_RUN} batches", flush=True)
    assert start(killed).wait() == start(tmp_path / "whole").wait() == os.EX_OK
    assert measured(killed) == measured(tmp_path / "whole")
