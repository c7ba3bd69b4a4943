"""Full recompute: nothing is reused; the accuracy that every other algorithm is held to."""

from dataclasses import dataclass
from typing import ClassVar

from picbench.engines.algorithms.base import Algorithm, Reuse
from picbench.engines.planning.policy import ChunkPolicy


@dataclass(frozen=True)
class Full(Algorithm):
    """Compute every token of every prompt."""

    name: ClassVar[str] = "full"
    summary: ClassVar[str] = "compute every token of every prompt"
    reuse: ClassVar[Reuse] = Reuse.NOTHING

    def plan_chunk(self, index: int, length: int) -> ChunkPolicy:
        """Link the whole chunk."""
        return ChunkPolicy(linked=range(length))
