"""`kill -9` at random moments, then the same command: the results of a run that nothing stopped."""

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from killed_run import REQUESTS

from picbench.store.reader import read_run
from picbench.store.writer import BATCHES

KILLS = 10
ARMS = ("full", "mepic")
REAL = ("--algo", "full,prefix,mepic", "--dataset", "musique", "--limit", "24",
        "--max-tokens", "8", "--concurrency", "2", "--device", "cpu", "--dtype", "float32",
        "--quiet")  # fmt: skip


def start(output: Path) -> "subprocess.Popen[str]":
    script = str(Path(__file__).parents[1] / "killed_run.py")
    flags = ("--dataset", "fake", "--data", "d", "--concurrency", "1", "--quiet")
    command = [sys.executable, script, "run", "--only", *flags, "--algo", ",".join(ARMS)]
    return subprocess.Popen(
        [*command, "--output", str(output)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Shells start what runs in the background with SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


Start = Callable[[Path], "subprocess.Popen[str]"]


def batches(output: Path) -> int:
    path = output / BATCHES
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for(process: "subprocess.Popen[str]", output: Path, count: int) -> None:
    """Wait until the run has so many batches, or has ended."""
    while process.poll() is None and batches(output) < count:
        time.sleep(0.002)


def kill_often(
    start: Callable[[Path], "subprocess.Popen[str]"],
    output: Path,
    kills: int,
    most: int,
    wait: float,
) -> None:
    """Kill a run again and again, after up to `most` batches and up to `wait` seconds each."""
    draw = random.Random(16)
    for number in range(kills):
        process = start(output)
        wait_for(process, output, batches(output) + draw.randint(0, most))
        time.sleep(draw.random() * wait)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        print(f"kill {number + 1}: {batches(output)} batches", flush=True)


def counters(output: Path) -> dict[str, object]:
    """What a run measured but for times."""
    run = read_run(output)
    arms = json.loads((output / "summary.json").read_text())["arms"]
    keys = ("requests", "failed", "score", "tokens", "output_tokens", "hits",
            "outcomes")  # fmt: skip
    return {
        "status": run.manifest["status"],
        "arms": {name: {key: arm[key] for key in keys} for name, arm in arms.items()},
        "rows": [
            (r.arm, r.sample, r.round, r.tokens, r.hits, r.output_sha256, r.text, r.score)
            for r in run.rows
        ],
    }


def test_ten_kills_change_nothing(tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    kill_often(start, killed, KILLS, 2 * REQUESTS // KILLS, 0.01)
    reference, last = start(tmp_path / "whole"), start(killed)
    for process in (reference, last):
        out, err = process.communicate()
        assert process.returncode == 0, err
        assert json.loads(out)["status"] == "complete"
    assert counters(killed) == counters(tmp_path / "whole")
    one, other = read_run(killed), read_run(tmp_path / "whole")
    # Times and what moved between tiers are constants in fake engines.
    assert one.rows == other.rows
    assert [a.moved for a in one.summary.values()] == [a.moved for a in other.summary.values()]
    assert one.ledger["referenced"].tolist() == other.ledger["referenced"].tolist()
    assert len(one.rows) == len(ARMS) * REQUESTS
    attempts = one.manifest["attempts"]
    assert len(attempts) > KILLS // 2
    assert {attempt["status"] for attempt in attempts[:-1]} == {"running"}


def start_real(output: Path) -> "subprocess.Popen[str]":
    """A run of real engines: nine batches."""
    command = [sys.executable, "-m", "picbench", "run", *REAL, "--output", str(output)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, text=True)


@pytest.mark.engine
def test_kills_change_neither_counters_nor_outputs(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Many minutes."""
    if not (kills := request.config.getoption("--kills")):
        pytest.skip("asked for by --kills")
    kill_often(start_real, tmp_path / "killed", kills, max(1, 9 // kills), 2)
    assert start_real(tmp_path / "killed").wait() == start_real(tmp_path / "whole").wait() == 0
    assert counters(tmp_path / "killed") == counters(tmp_path / "whole")


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
