"""MEPIC (arXiv 2512.16822): share chunk blocks in place, recompute each chunk's first block."""

from dataclasses import dataclass
from typing import ClassVar

from picbench.engines.algorithms.base import ChunkAlgorithm
from picbench.engines.config import BLOCK_SIZE
from picbench.engines.planning.policy import ChunkPolicy


@dataclass(frozen=True)
class Mepic(ChunkAlgorithm):
    """Recompute the first block of every chunk; an equal prefix hits it, like any prompt block."""

    name: ClassVar[str] = "mepic"
    summary: ClassVar[str] = "MEPIC: shared chunk blocks, first block of each chunk recomputed"

    def plan_chunk(self, index: int, length: int) -> ChunkPolicy:
        """Link the first block; no chunk is exempt."""
        return ChunkPolicy(linked=range(min(BLOCK_SIZE, length)), anchor=self.anchor)
