"""Cores that compute something else while an engine is measured.

Run as ``python -m picbench.measure.warm.busy_cores PARENT``, it keeps one core busy until it is
ended or its parent, given by its process id, is.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from picbench.arms.arm_process import end_with_parent

_READY = b"spinning\n"


@contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Keep this many cores busy, from the first line of the context to its last."""
    module = "picbench.measure.warm.busy_cores"
    command = (sys.executable, "-P", "-m", module, str(os.getpid()))
    spinning = list[subprocess.Popen[bytes]]()
    try:
        spinning += (subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(count))
        for process in spinning:
            assert process.stdout is not None
            if process.stdout.readline() != _READY:
                raise OSError(f"{module} ended")
        yield
    finally:
        for process in spinning:
            process.kill()
        for process in spinning:
            process.communicate()


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    sys.stdout.buffer.write(_READY)
    sys.stdout.buffer.flush()
    while True:
        pass
