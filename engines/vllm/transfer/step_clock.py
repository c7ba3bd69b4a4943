"""How long the steps of an engine take, and how much of that is the tiers' doing."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch

from picbench.engines.chunk_cache.transfers import StepTimes

_LOG = logging.getLogger(__name__)

#: Tiers are judged by this many seconds of steps at a time.
_WINDOW = 5.0


class WallTimer:
    """Sums how long what is done within `measure` takes. On a CPU it has ended when it returns."""

    def __init__(self) -> None:
        self._seconds = 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure what is done inside."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - began

    def take(self) -> float:
        """Seconds since the last call, of what has ended."""
        taken, self._seconds = self._seconds, 0.0
        return taken


class StreamTimer:
    """On a GPU: by events in the current stream.

    They do not wait for the GPU, and do not count the time in which a blocking copy waits for
    what was queued before: the first event is reached when that has ended. Nor do they count that
    the GPU then idles until the host, which the copy held up, has queued more: a timer around the
    whole step does. `event` makes one that records times. The current stream is the same where a
    measurement begins and ends, or the first event may be unfinished when the last one has ended.
    """

    def __init__(self, event: Callable[[], torch.cuda.Event] | None = None) -> None:
        self._event = event or partial(torch.cuda.Event, enable_timing=True)
        self._spare: list[torch.cuda.Event] = []
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure what is done inside."""
        first, last = self._take_event(), self._take_event()
        first.record()
        try:
            yield
        finally:
            last.record()
            self._pending.append((first, last))

    def take(self) -> float:
        """Seconds since the last call; what the GPU has not reached is counted by a later one."""
        milliseconds = 0.0
        while self._pending and self._pending[0][1].query():  # type: ignore[no-untyped-call]
            first, last = self._pending.popleft()
            milliseconds += first.elapsed_time(last)
            self._spare += (first, last)
        return milliseconds / 1e3

    def _take_event(self) -> torch.cuda.Event:
        return self._spare.pop() if self._spare else self._event()


class StepClock:
    """Measures a worker's steps, and in them what tiers take; `timer` makes its two timers."""

    def __init__(self, timer: Callable[[], WallTimer | StreamTimer]) -> None:
        self._steps, self._tiers = timer(), timer()
        self._in_step = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """A part of a step that computes something."""
        self._in_step = True
        try:
            with self._steps.measure():
                yield
        finally:
            self._in_step = False

    @contextmanager
    def tiers(self) -> Iterator[None]:
        """Work for tiers; it does not count in a step that computes nothing, as it delays none."""
        with self._tiers.measure() if self._in_step else nullcontext():
            yield

    def take(self) -> StepTimes:
        """Times since the last call."""
        return StepTimes(self._steps.take(), self._tiers.take())


class StepTimesWatch:
    """Sums the step times of an engine, and warns once if tiers slow its steps."""

    def __init__(self) -> None:
        self.total = StepTimes()
        self._window = StepTimes()
        self._warned = False

    def add(self, times: StepTimes) -> None:
        """Add the times of a step, of the slowest worker."""
        self.total += times
        self._window += times
        if self._window.steps < _WINDOW:
            return
        if self._window.slow and not self._warned:
            self._warned = True
            _LOG.warning(
                'tiers took %.0f %% of the last %.1f s of steps; an engine with `tiers=""` '
                "serves without",
                100 * self._window.share,
                self._window.steps,
            )
        self._window = StepTimes()
