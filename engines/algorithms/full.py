"""Full recompute: the accuracy to which every other algorithm is compared."""

from dataclasses import dataclass
from typing import ClassVar

from picbench.engines.algorithms.base import Algorithm, Reuse
from picbench.engines.planning.policy import ChunkPolicy


@dataclass(frozen=True)
class Full(Algorithm):
    """Reuse nothing.

    Compiled: nothing. Linked: all tokens. Shared: nothing.
    """

    name: ClassVar[str] = "full"
    summary: ClassVar[str] = "compute every token of every prompt"
    reuse: ClassVar[Reuse] = Reuse.NOTHING

    def plan_chunk(self, index: int, length: int) -> ChunkPolicy:
        """Link the whole chunk."""
        return ChunkPolicy(linked=range(length))
