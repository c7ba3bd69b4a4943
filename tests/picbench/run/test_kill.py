"""`kill -9` at random moments, then the same command: the results of a run that nothing stopped."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from killed_run import REQUESTS

from picbench.store.reader import read_run
from picbench.store.writer import BATCHES

KILLS = 10
ARMS = ("full", "mepic")


def start(output: Path) -> "subprocess.Popen[str]":
    script = str(Path(__file__).parents[1] / "killed_run.py")
    flags = ("--dataset", "fake", "--data", "d", "--concurrency", "1", "--quiet")
    command = [sys.executable, script, "run", *flags, "--algo", ",".join(ARMS)]
    return subprocess.Popen(
        [*command, "--output", str(output)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Shells start what runs in the background with SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def batches(output: Path) -> int:
    path = output / BATCHES
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for(process: "subprocess.Popen[str]", output: Path, count: int) -> None:
    """Wait until the run has so many batches, or has ended."""
    while process.poll() is None and batches(output) < count:
        time.sleep(0.002)


def counters(output: Path) -> dict[str, object]:
    """What a run measured but for times; these are constants in rows of fake engines."""
    run = read_run(output)
    arms = json.loads((output / "summary.json").read_text())["arms"]
    keys = ("requests", "failed", "score", "tokens", "computed_tokens", "hits", "moved", "outcomes")
    return {
        "status": run.manifest["status"],
        "rows": run.rows,
        "arms": {name: {key: arm[key] for key in keys} for name, arm in arms.items()},
        "ledger": run.ledger.groupby("arm")["referenced"].agg(list).to_dict(),
    }


def test_ten_kills_change_nothing(tmp_path: Path) -> None:
    draw = random.Random(16)
    killed = tmp_path / "killed"
    for _ in range(KILLS):
        process = start(killed)
        wait_for(process, killed, batches(killed) + draw.randint(0, 2 * REQUESTS // KILLS))
        time.sleep(draw.random() * 0.01)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    reference, last = start(tmp_path / "whole"), start(killed)
    for process in (reference, last):
        out, err = process.communicate()
        assert process.returncode == 0, err
        assert json.loads(out)["status"] == "complete"
    assert counters(killed) == counters(tmp_path / "whole")
    assert len(read_run(killed).rows) == len(ARMS) * REQUESTS
    attempts = read_run(killed).manifest["attempts"]
    assert len(attempts) > KILLS // 2
    assert {attempt["status"] for attempt in attempts[:-1]} == {"running"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_save_and_exit_with_130(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path / "run")
    wait_for(process, tmp_path / "run", 3)
    process.send_signal(number)
    out, err = process.communicate()
    assert process.returncode == 130
    assert err.splitlines()[-1] == "picbench: interrupted"
    last = json.loads(out.splitlines()[-1])
    assert (last["status"], last["exit_code"]) == ("interrupted", 130)
    rows = read_run(tmp_path / "run").rows
    assert len(rows) >= 3
    assert sum(arm["requests"] for arm in last["arms"].values()) == len(rows)
