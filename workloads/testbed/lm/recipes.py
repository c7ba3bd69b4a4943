"""How the model and its variants are trained."""

from dataclasses import dataclass
from types import MappingProxyType

from picbench.workloads.testbed.lm.schedule import Schedule

#: Link tokens behind every chunk of the link-tuned variant (KVLink's best setting).
LINKS_EACH = 5


@dataclass(frozen=True, slots=True)
class Recipe:
    """A schedule, the peak learning rates of the optimisers, and how often chunks are isolated.

    Muon trains the matrices inside the layers if it has a rate, AdamW all else. Every
    `isolate`-th step lets chunk tokens see their own chunk only (0: no step does). `rank` is that
    of the delta, for variants that are one.
    """

    schedule: Schedule
    adam: float
    muon: float = 0.0
    isolate: int = 0
    rank: int = 0


_LONG = ((0.0, (4096,)),)

#: The base model, then the variants that are deltas on it: block-tuned, half of the steps with
#: isolated chunks (Block-Attention), and link-tuned, all of them (KVLink).
RECIPES = MappingProxyType(
    {
        "base": Recipe(Schedule(4400), adam=3e-3, muon=0.01),
        "block": Recipe(
            Schedule(1600, grown=0, decay=0.3, lengths=_LONG), adam=2e-3, isolate=2, rank=28
        ),
        "link": Recipe(
            Schedule(1200, grown=0, decay=0.3, lengths=_LONG, links=LINKS_EACH),
            adam=2e-3,
            isolate=1,
            rank=16,
        ),
    }
)
