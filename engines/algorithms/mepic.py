"""MEPIC (arXiv 2512.16822): shared chunk blocks, the first block of each chunk recomputed."""

from dataclasses import dataclass
from typing import ClassVar

from picbench.engines.algorithms.base import ChunkAlgorithm
from picbench.engines.config import BLOCK_SIZE
from picbench.engines.planning.policy import ChunkPolicy


@dataclass(frozen=True)
class Mepic(ChunkAlgorithm):
    """Recompute the first block of every chunk.

    Compiled: each chunk alone. Linked: the first 16 tokens of every chunk; with an equal prefix
    their block is a cache hit, as any block of text. Shared: all other chunk blocks.

    ``pad=paper`` is the paper's alignment of segments (section on segment alignment); by default
    pads are invisible.
    """

    name: ClassVar[str] = "mepic"
    summary: ClassVar[str] = "MEPIC: shared chunk blocks, first block of each chunk recomputed"

    def plan_chunk(self, index: int, length: int) -> ChunkPolicy:
        """Link the first block; no chunk is exempt."""
        return ChunkPolicy(linked=range(min(BLOCK_SIZE, length)), anchor=self.anchor)
