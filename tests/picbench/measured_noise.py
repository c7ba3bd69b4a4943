"""Runs that could have been: rows of a real run, and the noise that was measured between arms.

``measured.json`` is a baseline of 64 MuSiQue rows of the testbed on two cores of an AMD EPYC that
other work kept busy, with the arms full, mepic, and full again (``full#2``) in one run.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from picbench.compare.arm import MeasuredArm
from picbench.compare.baseline import (
    Baseline,
    Thresholds,
    merge_arms,
    read_baseline,
    usual_thresholds,
    with_relative_times,
)
from picbench.compare.comparison import Conditions

FILE = Path(__file__).with_name("measured.json")

AGAIN = "full#2"


@cache
def measured() -> Baseline:
    return read_baseline(str(FILE))


def residuals(time: str = "ttft_ms") -> np.ndarray:  # type: ignore[type-arg]
    """Log ratios of the same requests in the same arm, taking turns: noise and nothing else."""
    first, second = (measured().arms[arm].times[time] for arm in ("full", AGAIN))
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a and b]
    logs = np.log([b / a for a, b in pairs])
    return logs - logs.mean()


def possible_run(seed: int, size: int = 600, drift: float = 0.0) -> dict[str, MeasuredArm]:
    """The arms full and mepic over `size` requests, at another time.

    A request is one of the 64, with half the variance of what two measurements of it differ by;
    `drift` is by how much logarithms of all times vary from run to run.
    """
    rng = np.random.default_rng(seed)
    slower = rng.normal(0, drift) if drift else 0.0
    rows = np.arange(size) % len(measured().arms["full"].samples)
    return {
        name: _resampled(measured().arms[name], rows, rng, slower) for name in ("full", "mepic")
    }


def save(runs: Sequence[dict[str, MeasuredArm]], thresholds: Thresholds | None = None) -> Baseline:
    """A baseline of such runs."""
    found = [with_relative_times(run) for run in runs]
    return Baseline(
        made="2026-11-22",
        picbench="0.1.0",
        runs=len(runs),
        metric="f1",
        thresholds=thresholds or usual_thresholds(found),
        conditions=Conditions(workload={}, hardware={}),
        arms={name: merge_arms([run[name] for run in found]) for name in found[0]},
    )


def _resampled(
    arm: MeasuredArm,
    rows: np.ndarray,  # type: ignore[type-arg]
    rng: np.random.Generator,
    slower: float,
) -> MeasuredArm:
    drawn, times = arm.of_rows(list(rows)), {}
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        noise = rng.choice(residuals(name), len(rows)) / np.sqrt(2) + slower
        times[name] = tuple(
            None if value is None else value * float(np.exp(more))
            for value, more in zip(drawn.times[name], noise, strict=True)
        )
    names, count = tuple(f"s{n}" for n in range(len(rows))), tuple(range(len(rows)))
    return replace(drawn, samples=names, clusters=names, rounds=count, places=count, times=times)
