"""Where a measurement was taken: processor and commit."""

import platform
import subprocess
from pathlib import Path


def commit() -> str:
    """The checkout's commit, with ``-dirty`` behind it if files differ from it."""
    folder = str(Path(__file__).parent)
    command = ["git", "-C", folder, "describe", "--always", "--dirty", "--abbrev=40"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "none: not in a checkout"


def cpu_model() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
