"""Naive reuse: canonical chunk KV as it is; the lower bound on work and on accuracy."""

from dataclasses import dataclass
from typing import ClassVar

from picbench.engines.algorithms.base import ChunkAlgorithm
from picbench.engines.planning.policy import Treatment


@dataclass(frozen=True)
class Naive(ChunkAlgorithm):
    """Recompute nothing inside chunks."""

    name: ClassVar[str] = "naive"
    summary: ClassVar[str] = "reuse chunks, recompute nothing inside them"

    def treat(self, index: int, length: int) -> Treatment:
        """Link nothing."""
        return Treatment(anchor=self.anchor)
