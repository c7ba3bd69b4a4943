"""How training goes: what each step sees, and how large it is."""

from dataclasses import dataclass

from picbench.workloads.testbed.lm.packing import USUAL, Shares, Stage

_WARM_UP = 100
_FLOOR = 0.02


@dataclass(frozen=True, slots=True)
class Schedule:
    """A course of `steps` steps of `tokens` tokens each.

    The curriculum ends at the share `grown` of the steps; the learning rate falls from the share
    `decay` on. `lengths` gives, for each share of the steps from which it holds, the lengths of
    sequences that take turns; `shares` how often an example is of each data set.
    """

    steps: int
    tokens: int = 131_072
    grown: float = 0.5
    decay: float = 0.6
    lengths: tuple[tuple[float, tuple[int, ...]], ...] = (
        (0.0, (1024,)),
        (0.3, (2048,)),
        (0.8, (2048, 4096)),
    )
    links: int = 0
    shares: Shares = USUAL

    def stage(self, step: int) -> Stage:
        """What the batch of a step is made of; sequences have one token more for the targets."""
        share = step / self.steps
        turns = [lengths for start, lengths in self.lengths if start <= share][-1]
        length = turns[step % len(turns)]
        progress = min(1.0, share / self.grown) if self.grown else 1.0
        return Stage(max(1, self.tokens // length), length + 1, progress, self.links, self.shares)

    def rate(self, step: int) -> float:
        """The factor of the learning rates."""
        left = (1 - step / self.steps) / (1 - self.decay)
        return min(1.0, (step + 1) / _WARM_UP, max(_FLOOR, left))
