"""How far a run is, on stderr: a live bar on a terminal, else plain lines."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar
from rich.text import Text

#: Seconds between plain lines.
INTERVAL = 10.0


class Progress:
    """Shows what a run does; this one shows nothing."""

    def say(self, message: str) -> None:
        """Print a line."""

    def begin(self, done: int = 0) -> None:
        """Start the clock: the first request after the `done` ones is about to be sent."""

    def advance(self, arm: str, requests: int) -> None:
        """Count requests that an arm answered or failed."""


class LaterProgress(Progress):
    """Shows one of several runs, which `before` requests of other runs came before."""

    def __init__(self, whole: Progress, before: int) -> None:
        self._whole = whole
        self._before = before

    def say(self, message: str) -> None:
        """See Progress."""
        self._whole.say(message)

    def begin(self, done: int = 0) -> None:
        """See Progress."""
        self._whole.begin(self._before + done)

    def advance(self, arm: str, requests: int) -> None:
        """See Progress."""
        self._whole.advance(arm, requests)


class PlainProgress(Progress):
    """Prints a line every few seconds: done, rate, time left. `clock` gives seconds."""

    def __init__(self, total: int, stream: TextIO, clock: Callable[[], float] = monotonic) -> None:
        self._total = total
        self._stream = stream
        self._clock = clock
        self._done = self._before = 0
        self._began = self._printed = clock()

    def say(self, message: str) -> None:
        """See Progress."""
        print(f"picbench: {message}", file=self._stream, flush=True)

    def begin(self, done: int = 0) -> None:
        """See Progress."""
        self._done = self._before = done
        self._began = self._printed = self._clock()

    def advance(self, arm: str, requests: int) -> None:
        """See Progress."""
        self._done += requests
        now = self._clock()
        if now - self._printed >= INTERVAL or self._done == self._total:
            self._printed = now
            self.say(self._state(arm, now - self._began))

    def _state(self, arm: str, seconds: float) -> str:
        state = f"{self._done}/{self._total} requests, last by {arm}"
        if seconds <= 0:
            return state
        rate = (self._done - self._before) / seconds
        left = (self._total - self._done) / rate
        time = f"{minutes(left)} left" if left else f"took {minutes(seconds)}"
        return f"{state}, {rate:.2f} requests/s, {time}"


class LiveProgress(Progress):
    """A bar that redraws itself while `bar` is open."""

    def __init__(self, total: int, bar: Bar) -> None:
        self._bar = bar
        self._task = bar.add_task("starting engines", total=total, start=False)

    def say(self, message: str) -> None:
        """See Progress."""
        self._bar.console.print(f"picbench: {message}", highlight=False, markup=False)

    def begin(self, done: int = 0) -> None:
        """See Progress."""
        self._bar.reset(self._task, completed=done)

    def advance(self, arm: str, requests: int) -> None:
        """See Progress."""
        self._bar.update(self._task, description=arm, advance=requests)


class RateColumn(ProgressColumn):
    """Requests a second."""

    def render(self, task: Task) -> Text:
        """The rate, or nothing before there is one."""
        return Text(f"{task.speed:.2f} requests/s" if task.speed else "")


@contextmanager
def open_progress(total: int, *, quiet: bool = False) -> Iterator[Progress]:
    """Progress over `total` requests; plain under CI and NO_COLOR and where stderr is a file."""
    if quiet:
        yield Progress()
        return
    if not is_live(sys.stderr):
        yield PlainProgress(total, sys.stderr)
        return
    bar = Bar(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        RateColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        speed_estimate_period=120,
    )
    with bar:
        yield LiveProgress(total, bar)


def is_live(stream: TextIO) -> bool:
    """Whether a bar may be drawn on `stream`."""
    return stream.isatty() and not (os.environ.get("CI") or os.environ.get("NO_COLOR"))


def minutes(seconds: float) -> str:
    """Seconds as ``minutes:seconds``."""
    whole, rest = divmod(round(seconds), 60)
    return f"{whole}:{rest:02}"
