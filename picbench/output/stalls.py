"""Steps of an engine that took much longer than its steps do."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np

from picbench.engines.ledger import IDLE, Snapshot

#: Kinds of slot that a step with prompt tokens adds.
_PROMPT = ("chunk", "linked", "prompt", "private")

#: A step may take this many times the upper quartile of its engine's slowest class of steps: within
#: a class steps differ by how full they are, in prompts by less than a factor of ten.
FACTOR = 10.0

#: Nor is anything shorter a stall, in seconds: a step that waits for the operating system, for
#: Python's garbage collector or for another process on the same cores takes that long.
LEAST = 1.0

#: Steps of a class of which a quartile can be had.
ENOUGH = 8


@dataclass(frozen=True, slots=True)
class Stalls:
    """Steps of an arm that took longer than `allowed_s`: how many, and the longest of all steps."""

    steps: int
    allowed_s: float
    longest_s: float


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of steps while requests were running: those with prompt tokens, and all others."""

    prompt: tuple[float, ...] = ()
    other: tuple[float, ...] = ()

    @classmethod
    def of(cls, batches: Sequence["StepSeconds"]) -> "StepSeconds":
        """The steps of several batches together."""
        prompt = tuple(chain.from_iterable(batch.prompt for batch in batches))
        return cls(prompt, tuple(chain.from_iterable(batch.other for batch in batches)))


def step_seconds(snapshots: Sequence[Snapshot]) -> StepSeconds:
    """The times between the snapshots of one batch, by the class of the step between them.

    A snapshot is taken when a step is scheduled. Where it has more of a prompt than the one before,
    the step computes prompt tokens. Time in which nothing was running is no step's.
    """
    prompt: list[float] = []
    other: list[float] = []
    before = dict.fromkeys(_PROMPT, 0.0)
    for now, following in pairwise(snapshots):
        grown = any(now.blocks[kind] > before[kind] for kind in _PROMPT)
        if now.pool > sum(now.blocks[kind] for kind in IDLE):
            (prompt if grown else other).append(following.time - now.time)
        before = {kind: now.blocks[kind] for kind in _PROMPT}
    return StepSeconds(tuple(prompt), tuple(other))


def find_stalls(seconds: StepSeconds) -> Stalls | None:
    """Stalls by the arm's own measure; None where it has too few steps to have one.

    The quartile of a class does not change by a few steps that stalled, and the slowest class
    decides, so that a long prompt among many steps of decoding is none.
    """
    if len(seconds.prompt) < ENOUGH:
        # Prompts take longest, and the slowest class is not known.
        return None
    classes = (steps for steps in (seconds.prompt, seconds.other) if len(steps) >= ENOUGH)
    slowest = max(float(np.quantile(steps, 0.75)) for steps in classes)
    allowed = max(LEAST, FACTOR * slowest)
    found = [*seconds.prompt, *seconds.other]
    return Stalls(sum(step > allowed for step in found), allowed, max(found))
