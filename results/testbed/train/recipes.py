"""The schedules and recipes that the model and its variants are trained with."""

from dataclasses import dataclass
from types import MappingProxyType

from packing import USUAL, Shares, Stage

from picbench.workloads.testbed.prompt import LINKS_EACH

_WARM_UP = 100
_FLOOR = 0.02


@dataclass(frozen=True, slots=True)
class Schedule:
    """A course of `steps` steps of `tokens` tokens each.

    The curriculum ends at the share `grown` of the steps; the learning rate falls from the share
    `decay` on. `lengths` has, for each share of the steps from which they apply, the lengths of
    sequences, which alternate; `shares` are the frequencies of the data sets.
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
        """The composition of a step's batch; sequences have one more token for the targets."""
        share = step / self.steps
        lengths = [lengths for start, lengths in self.lengths if start <= share][-1]
        length = lengths[step % len(lengths)]
        progress = min(1.0, share / self.grown) if self.grown else 1.0
        return Stage(max(1, self.tokens // length), length + 1, progress, self.links, self.shares)

    def rate(self, step: int) -> float:
        """The factor of the learning rates."""
        left = (1 - step / self.steps) / (1 - self.decay)
        return min(1.0, (step + 1) / _WARM_UP, max(_FLOOR, left))


@dataclass(frozen=True, slots=True)
class Recipe:
    """A schedule, the peak learning rates of the optimisers, and the share of isolated rows.

    Muon trains the matrices inside the layers if its rate is set, AdamW all else. In the share
    `isolate` of every batch, chunk tokens see their own chunk only. `rank` is the rank of a
    variant's delta.
    """

    schedule: Schedule
    adam: float
    muon: float = 0.0
    isolate: float = 0.0
    rank: int = 0


_LONG = ((0.0, (4096,)),)
#: The base can already write summaries: variants train where reading a context has changed.
_VARIANTS = Shares(musique=5, wikimqa=4, hotpotqa=4, samsum=1, multi_news=2, needle=5)


def _variant(
    steps: int, adam: float, decay: float, isolate: float, rank: int, links: int = 0
) -> Recipe:
    schedule = Schedule(steps, grown=0, decay=decay, lengths=_LONG, links=links, shares=_VARIANTS)
    return Recipe(schedule, adam=adam, isolate=isolate, rank=rank)


#: The base model, then the variants that are deltas on it: block-tuned, half of each batch with
#: isolated chunks (Block-Attention), and link-tuned, all of it (KVLink).
RECIPES = MappingProxyType(
    {
        "base": Recipe(Schedule(4400), adam=3e-3, muon=0.01),
        # At 4e-3, decaying from 0.3 on, musique under naive reuse kept 0.88 instead of 0.95.
        "block": _variant(3000, adam=1.5e-3, decay=0.05, isolate=0.5, rank=56),
        "link": _variant(1800, adam=4e-3, decay=0.3, isolate=1.0, rank=34, links=LINKS_EACH),
    }
)
