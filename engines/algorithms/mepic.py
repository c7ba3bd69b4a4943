"""MEPIC (arXiv 2512.16822): shared chunk blocks, the first block of each chunk recomputed."""

from dataclasses import dataclass
from typing import ClassVar

from picbench.engines.algorithms.base import ChunkAlgorithm, option
from picbench.engines.algorithms.number_range import NumberRange
from picbench.engines.config import BLOCK_SIZE
from picbench.engines.planning.policy import ChunkPolicy


@dataclass(frozen=True)
class Mepic(ChunkAlgorithm):
    """Recompute the first block, or the first few, of every chunk.

    Compiled: each chunk alone. Linked: the first 16 tokens of every chunk, or those of the first
    ``blocks`` blocks; with an equal prefix their blocks are cache hits, as any block of text.
    Shared: all other chunk blocks.

    ``pad=paper`` is the paper's alignment of segments (section on segment alignment); by default
    pads are invisible.
    """

    name: ClassVar[str] = "mepic"
    summary: ClassVar[str] = "MEPIC: shared chunk blocks, first block of each chunk recomputed"

    blocks: int = option(1, "blocks recomputed at the start of a chunk", NumberRange(1))

    def plan_chunk(self, index: int, length: int) -> ChunkPolicy:
        """Link the first blocks; no chunk is exempt."""
        linked = range(min(self.blocks * BLOCK_SIZE, length))
        return ChunkPolicy(linked=linked, anchor=self.anchor)
