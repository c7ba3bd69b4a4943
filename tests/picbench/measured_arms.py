"""Arms as comparisons see them, without a run."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from picbench.compare.arm import COUNTERS, MeasuredArm

T = TypeVar("T")


def known(value: T | None) -> T:
    """A value that must be there."""
    assert value is not None
    return value


def make_arm(
    name: str = "full",
    scores: Sequence[float | None] = (1.0,) * 20,
    ttft: Sequence[float | None] | None = None,
    computed: int = 100,
    size: int = 1,
) -> MeasuredArm:
    """An arm with a request for each score, `size` requests a round."""
    count = len(scores)
    times = tuple(ttft) if ttft is not None else (50.0,) * count
    return MeasuredArm(
        name=name,
        samples=tuple(f"s{n}" for n in range(count)),
        clusters=tuple(f"d{n}" for n in range(count)),
        rounds=tuple(n // size for n in range(count)),
        places=tuple(range(count)),
        repeats=(0,) * count,
        prompts=tuple(f"p{n}" for n in range(count)),
        outputs=tuple(f"o{n}" for n in range(count)),
        scores=tuple(scores),
        times={"ttft_ms": times, "tpot_ms": (5.0,) * count, "e2e_ms": times},
        counters={c: (computed if c == "computed_tokens" else 7,) * count for c in COUNTERS},
        totals={"peak_blocks": 40.0, "failed": 0},
    )


def repeated(arm: MeasuredArm, times: int) -> MeasuredArm:
    """The arm as it is when its requests are run several times, each as long as the first time."""

    def again(column: Sequence[object]) -> tuple[object, ...]:
        return tuple(column) * times

    names = ("clusters", "rounds", "places", "prompts", "outputs", "scores")
    labels = ("", *(f"#{number}" for number in range(2, times + 1)))
    columns = {name: again(getattr(arm, name)) for name in names}
    columns["samples"] = tuple(f"{name}{label}" for label in labels for name in arm.samples)
    columns["repeats"] = tuple(number for number in range(times) for _ in arm.samples)
    measured = {name: again(column) for name, column in arm.times.items()}
    counted = {name: again(column) for name, column in arm.counters.items()}
    return replace(arm, times=measured, counters=counted, **columns)  # type: ignore[arg-type]


def noisy(arm: MeasuredArm, seed: int, noise: float = 0.05, factor: float = 1.0) -> MeasuredArm:
    """The arm as it could have been measured at another time, `factor` as slow."""
    rng = np.random.default_rng(seed)
    times = {
        name: tuple(
            None if value is None else value * factor * float(np.exp(rng.normal(0, noise)))
            for value in values
        )
        for name, values in arm.times.items()
    }
    return replace(arm, times=times)
