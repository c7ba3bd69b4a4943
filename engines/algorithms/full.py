"""Full recompute: nothing is reused; the accuracy that every other algorithm is held to."""

from dataclasses import dataclass
from typing import ClassVar

from picbench.engines.algorithms.base import Algorithm, Reuse
from picbench.engines.planning.policy import Treatment


@dataclass(frozen=True)
class Full(Algorithm):
    """Compute every token of every prompt."""

    name: ClassVar[str] = "full"
    summary: ClassVar[str] = "compute every token of every prompt"
    reuse: ClassVar[Reuse] = Reuse.NOTHING

    def treat(self, index: int, length: int) -> Treatment:
        """Link the whole chunk."""
        return Treatment(linked=range(length))
