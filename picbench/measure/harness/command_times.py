"""What commands cost, each in a process of its own."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from picbench.errors import EngineError


@dataclass(frozen=True, slots=True)
class CommandTimes:
    """Seconds of one command, run after run: of all cores together, and on the clock."""

    command: str
    cpu_s: tuple[float, ...]
    wall_s: tuple[float, ...]


def time_command(name: str, arguments: Sequence[str], repeats: int) -> CommandTimes:
    """Run `picbench` with `arguments` so often. Raises EngineError where it fails."""
    runs = [_run(arguments) for _ in range(repeats)]
    cpu, wall = zip(*runs, strict=True)
    return CommandTimes(name, cpu, wall)


def _run(arguments: Sequence[str]) -> tuple[float, float]:
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "picbench", *arguments], stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise EngineError(
            f"picbench {' '.join(arguments)} ended with exit code {process.returncode}"
        )
    return usage.ru_utime + usage.ru_stime, time.perf_counter() - began
