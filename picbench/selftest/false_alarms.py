"""How often comparisons find a difference between two measurements of the same thing."""

from dataclasses import replace

import numpy as np

from picbench.comparison.arm_comparison import compare_arms
from picbench.comparison.measured_arm import TIMES, MeasuredArm
from picbench.comparison.run_comparison import adjusted

#: Of an alarm: any adjusted p below it.
ALPHA = 0.05

#: Comparisons, and requests in each.
SEEDS, REQUESTS = 100, 200


def false_alarms(
    first: MeasuredArm, second: MeasuredArm, seeds: int = SEEDS, requests: int = REQUESTS
) -> int:
    """Of `seeds` comparisons of `first` and `second` with nothing between them, those that alarm.

    Each draws `requests` of those that both answered, with replacement, and swaps the two sides of
    every one by chance: no side can be the slower one or the better one, and the noise is what was
    measured. The rest is what `picbench compare` does with two arms of a run.
    """
    places = {sample: place for place, sample in enumerate(second.samples)}
    shared = [(p, places[sample]) for p, sample in enumerate(first.samples) if sample in places]
    alarms = 0
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        drawn = [shared[i] for i in rng.integers(len(shared), size=requests)]
        swapped = rng.random(requests) < 0.5
        before, after = _sides(first, second, drawn, swapped.tolist())
        (found,) = adjusted([compare_arms(before, after, seed=seed)])
        alarms += any(metric.p < ALPHA for metric in found.metrics)
    return alarms


def _sides(
    first: MeasuredArm,
    second: MeasuredArm,
    drawn: list[tuple[int, int]],
    swapped: list[bool],
) -> tuple[MeasuredArm, MeasuredArm]:
    """Two arms of the drawn requests, each of its own name, cluster and round."""
    picks = [((first, a), (second, b)) for a, b in drawn]
    sides = [
        (two, one) if swap else (one, two) for (one, two), swap in zip(picks, swapped, strict=True)
    ]
    return _arm([side[0] for side in sides]), _arm([side[1] for side in sides])


def _arm(requests: list[tuple[MeasuredArm, int]]) -> MeasuredArm:
    model, names = requests[0][0], tuple(f"{n}" for n in range(len(requests)))
    return replace(
        model,
        samples=names,
        clusters=names,
        rounds=tuple(range(len(requests))),
        places=tuple(range(len(requests))),
        repeats=(0,) * len(requests),
        prompts=tuple(arm.prompts[place] for arm, place in requests),
        outputs=tuple(arm.outputs[place] for arm, place in requests),
        scores=tuple(arm.scores[place] for arm, place in requests),
        times={name: tuple(arm.times[name][place] for arm, place in requests) for name in TIMES},
        counters={
            name: tuple(arm.counters[name][place] for arm, place in requests)
            for name in model.counters
        },
        totals={},
    )
