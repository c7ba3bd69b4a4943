"""Naive reuse: canonical chunk KV as it is; the lower bound on work and on accuracy."""

from dataclasses import dataclass
from typing import ClassVar

from picbench.engines.algorithms.base import ChunkAlgorithm
from picbench.engines.planning.policy import ChunkPolicy


@dataclass(frozen=True)
class Naive(ChunkAlgorithm):
    """Recompute nothing inside chunks."""

    name: ClassVar[str] = "naive"
    summary: ClassVar[str] = "reuse chunks, recompute nothing inside them"

    def plan_chunk(self, index: int, length: int) -> ChunkPolicy:
        """Link nothing."""
        return ChunkPolicy(anchor=self.anchor)
