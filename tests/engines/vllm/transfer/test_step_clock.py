"""How long steps take, and what tiers take of them."""

import ctypes
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from picbench.engines.chunk_cache.transfers import StepTimes, TransferResults
from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, Request, Text
from picbench.engines.vllm.transfer.copies import PlainCopies
from picbench.engines.vllm.transfer.step_clock import (
    StepClock,
    StepTimesWatch,
    StreamTimer,
    WallTimer,
)


@dataclass
class Stream:
    """A GPU's stream that has got as far as `reached`, in milliseconds."""

    now: float = 0.0
    reached: float = 0.0


@dataclass
class Event:
    """An event of such a stream."""

    stream: Stream
    time: float = -1.0

    def record(self) -> None:
        self.time = self.stream.now

    def query(self) -> bool:
        return self.time <= self.stream.reached

    def elapsed_time(self, later: "Event") -> float:
        return later.time - self.time


def test_a_stream_is_timed_without_waiting_for_it() -> None:
    stream, made = Stream(), []

    def event() -> torch.cuda.Event:
        made.append(Event(stream))
        return cast(torch.cuda.Event, made[-1])

    timer = StreamTimer(event)
    for length in (250.0, 500.0):
        with timer.measure():
            stream.now += length
    assert timer.take() == 0.0
    stream.reached = 600.0
    assert timer.take() == 0.25
    stream.reached = 800.0
    assert timer.take() == 0.5
    with timer.measure():
        pass
    assert len(made) == 4


class Gate:
    """Holds the current stream of the GPU from where it is queued until it is opened.

    `held` are the seconds that it held the stream, at least: the clock runs in the very function
    that the stream waits for (CUDA driver API, cuLaunchHostFunc). A gate that is never opened
    gives up, so that a test that waits for it fails instead of waiting forever.
    """

    def __init__(self) -> None:
        self.held = 0.0
        self._opened = threading.Event()
        # The driver calls it later, so it must not be collected before.
        self._function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._hold)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        driver = ctypes.CDLL("libcuda.so.1")
        assert driver.cuLaunchHostFunc(stream, self._function, None) == 0

    def _hold(self, _: object) -> None:
        began = time.perf_counter()
        self._opened.wait(60)
        time.sleep(0.01)
        self.held = time.perf_counter() - began

    def open(self) -> None:
        self._opened.set()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_timed_without_waiting_for_it() -> None:
    """Each bound follows from the order in the stream, whatever else the GPU runs."""
    timer = StreamTimer()
    torch.cuda.synchronize()
    for _ in range(2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        before = Gate()
        with timer.measure():
            inside = Gate()
        end.record()
        assert timer.take() == 0.0
        before.open()
        assert timer.take() == 0.0
        inside.open()
        torch.cuda.synchronize()
        measured, whole = timer.take(), start.elapsed_time(end) / 1e3
        # The clocks of host and GPU may differ by a little.
        assert 0.0 < 0.99 * inside.held <= measured <= whole - 0.99 * before.held
        assert timer.take() == 0.0
    assert len(timer._spare) == 2


def test_only_steps_that_compute_count() -> None:
    clock = StepClock(WallTimer)
    with clock.tiers():
        pass
    assert clock.take() == StepTimes()
    with clock.step(), clock.tiers():
        time.sleep(0.001)
    times = clock.take()
    assert times.steps >= times.tiers > 0
    assert clock.take() == StepTimes()


def test_ranks_that_step_together_take_as_long_as_the_slowest() -> None:
    one = TransferResults(times=StepTimes(2.0, 0.1))
    assert one.merge(TransferResults(times=StepTimes(1.0, 0.3))).times == StepTimes(2.0, 0.3)


def test_slow_tiers_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = StepTimesWatch()
    with caplog.at_level(logging.WARNING):
        for tiers in (0.1, 0.3, 0.3, 0.3):
            for _ in range(3):
                watch.add(StepTimes(2.0, tiers))
    assert [record.getMessage() for record in caplog.records] == [
        'tiers took 15 % of the last 6.0 s of steps; an engine with `tiers=""` serves without'
    ]
    assert watch.total.steps == pytest.approx(24.0)
    assert watch.total.tiers == pytest.approx(3.0)


@pytest.mark.engine
@pytest.mark.parametrize("tiers", ["host:64MiB", ""])
def test_an_engine_says_what_tiers_took(
    tiers: str, llama: Path, draw: Callable[[int, int], tuple[int, ...]], monkeypatch: Any
) -> None:
    slow, store = 0.05, PlainCopies.store

    def store_slowly(copies: PlainCopies, *args: Any) -> Any:
        time.sleep(slow)
        return store(copies, *args)

    monkeypatch.setattr(PlainCopies, "store", store_slowly)
    settings = {"dtype": "float32", "kv_blocks": 100, "context": 512, "batch_tokens": 128}
    chunks = [Chunk(tokens=draw(40, seed)) for seed in (1, 2)]
    with Engine(EngineConfig(str(llama), tiers=tiers, **settings)) as engine:
        assert engine.describe()["tiers"] == tiers
        engine.generate([Request([*chunks, Text(tokens=draw(9, 3))], max_tokens=8)])
        times = engine.step_times
    if tiers:
        assert times.steps > times.tiers >= 2 * slow
    else:
        assert times == StepTimes()
