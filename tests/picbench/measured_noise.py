"""Runs that could have been: rows of a real run, and the noise that was measured between arms.

``measured.json`` is a baseline of 64 MuSiQue rows of the testbed on two cores of an AMD EPYC that
other work kept busy, with the arms full, mepic, and full again (``full#2``) in one run.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from picbench.compare.arm import MeasuredArm
from picbench.compare.baseline import (
    CHECKED,
    Baseline,
    BaselineArm,
    BaselineConditions,
    Thresholds,
    read_baseline,
    usual_thresholds,
    with_relative_times,
)

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
        name: _resampled(measured().arms[name].measured(name), rows, rng, slower)
        for name in ("full", "mepic")
    }


def save(runs: Sequence[dict[str, MeasuredArm]], thresholds: Thresholds | None = None) -> Baseline:
    """A baseline of such runs."""
    found = [with_relative_times(run) for run in runs]
    return Baseline(
        made="2026-11-22",
        picbench="0.1.0",
        runs=len(runs),
        metric="f1",
        thresholds=thresholds or usual_thresholds(CHECKED, repeated=len(runs) > 1),
        conditions=BaselineConditions(workload={}, hardware={}),
        arms={name: BaselineArm.of([run[name] for run in found]) for name in found[0]},
    )


def _resampled(
    arm: MeasuredArm,
    rows: np.ndarray,  # type: ignore[type-arg]
    rng: np.random.Generator,
    slower: float,
) -> MeasuredArm:
    count = len(rows)
    times = {}
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        noise = rng.choice(residuals(name), count) / np.sqrt(2) + slower
        values = [arm.times[name][row] for row in rows]
        times[name] = tuple(
            None if value is None else value * float(np.exp(more))
            for value, more in zip(values, noise, strict=True)
        )
    names = tuple(f"s{n}" for n in range(count))
    return MeasuredArm(
        name=arm.name,
        samples=names,
        clusters=names,
        rounds=tuple(range(count)),
        places=tuple(range(count)),
        repeats=(0,) * count,
        prompts=tuple(arm.prompts[row] for row in rows),
        outputs=tuple(arm.outputs[row] for row in rows),
        scores=tuple(arm.scores[row] for row in rows),
        times=times,
        counters={c: tuple(values[row] for row in rows) for c, values in arm.counters.items()},
        totals=arm.totals,
    )
