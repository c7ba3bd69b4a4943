"""Cores of this host: ones that compute something else, and ones that nothing else uses.

Run as ``python -m picbench.experiments.host_cores PARENT``, it keeps one core busy until it is
ended or its parent, given by its process id, is.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from math import inf

from picbench.run.server import end_with_parent

_READY = b"spinning\n"


@contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Keep this many cores busy, from the first line of the context to its last."""
    module = "picbench.experiments.host_cores"
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


#: A core is quiet if its loop takes at most so many times as long as the shortest one that was
#: seen. On an H200's host small steps take no longer up to there; from 1.6 on 1.2 times as long.
_QUIET = 1.35

#: A loop, and how many of them the shortest is of: an interrupt makes one of them longer.
_LOOP, _LOOPS = range(5_000), 3


class QuietCores:
    """Moves the calling thread to a quiet core. It may use all of its cores before and afterwards.

    `shortest` is the shortest loop of others on this machine: all cores may be busy at the moment.
    `cores` are those of the thread, `move` moves it to one of them, `probe` gives the seconds that
    a short loop takes on the one where it is.
    """

    def __init__(
        self,
        shortest: float = inf,
        cores: Sequence[int] | None = None,
        move: Callable[[int], None] | None = None,
        probe: Callable[[], float] | None = None,
    ) -> None:
        self._cores = _own_cores() if cores is None else cores
        self._move, self._probe = move or _move, probe or time_loop
        self._others = cycle(self._cores)
        self.shortest = min(shortest, *self._probes())

    def settle(self) -> bool:
        """Stay on a quiet core, or look for one; whether there is one."""
        if self._is_quiet():
            return True
        for core in islice(self._others, len(self._cores)):
            self._move(core)
            if self._is_quiet():
                return True
        return False

    def _probes(self) -> Iterator[float]:
        """How long the loop takes here, and on each core."""
        yield self._probe()
        for core in self._cores:
            self._move(core)
            yield self._probe()

    def _is_quiet(self) -> bool:
        took = self._probe()
        self.shortest = min(self.shortest, took)
        return took <= _QUIET * self.shortest


def time_loop() -> float:
    """Seconds of a short loop of Python, which needs nothing but its core."""
    return min(_time_once() for _ in range(_LOOPS))


def _time_once() -> float:
    began, total = time.perf_counter(), 0
    for number in _LOOP:
        total += number
    return time.perf_counter() - began


def _own_cores() -> tuple[int, ...]:
    """The cores that this thread may use; none where the system cannot say, or move it."""
    if not hasattr(os, "sched_setaffinity"):
        return ()
    return tuple(sorted(os.sched_getaffinity(0)))


def _move(core: int) -> None:
    """Move this thread to a core, which it may leave again; it stays where a core has gone."""
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {core})
    except OSError:
        return
    os.sched_setaffinity(0, allowed)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    sys.stdout.buffer.write(_READY)
    sys.stdout.buffer.flush()
    while True:
        pass
