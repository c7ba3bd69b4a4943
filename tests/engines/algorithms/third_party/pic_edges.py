"""Recompute both ends of every chunk."""

from dataclasses import dataclass
from typing import ClassVar

from picbench.engines.algorithms import ChunkAlgorithm, NumberRange, option
from picbench.engines.planning.policy import ChunkPolicy


@dataclass(frozen=True)
class Edges(ChunkAlgorithm):
    """Recompute the first and the last n tokens of every chunk.

    Compiled: each chunk alone. Linked: n tokens at either end. Shared: all chunk blocks that hold a
    token which is not linked.
    """

    name: ClassVar[str] = "edges"
    summary: ClassVar[str] = "recompute the first and the last n tokens of every chunk"

    n: int = option(8, "tokens recomputed at either end of a chunk", NumberRange(0), named=True)

    def plan_chunk(self, index: int, length: int) -> ChunkPolicy:
        """Link both ends, which may overlap; no chunk is exempt."""
        first, last = range(min(self.n, length)), range(max(0, length - self.n), length)
        return ChunkPolicy(linked=sorted({*first, *last}), anchor=self.anchor)
