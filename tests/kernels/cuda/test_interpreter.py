"""The kernels' tests, interpreted on the CPU where there is no GPU to compile them for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

DEVICE_TESTS = Path(__file__).parent / "device"


@pytest.mark.skipif(torch.cuda.is_available(), reason="they run compiled, in this process")
def test_kernels_in_triton_interpreter() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", str(DEVICE_TESTS)]
    done = subprocess.run(
        command,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
