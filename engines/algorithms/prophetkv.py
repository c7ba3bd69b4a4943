"""ProphetKV (arXiv 2602.02579): the tokens recomputed that the question attends to most."""

from dataclasses import dataclass
from typing import ClassVar

from picbench.engines.algorithms.base import CopyingAlgorithm, NumberRange, option
from picbench.engines.planning.policy import ChunkPolicy, QuestionSelection


@dataclass(frozen=True)
class ProphetKV(CopyingAlgorithm):
    """Recompute a share r of the tokens of all chunks, those that the question attends to most.

    After the paper, whose code is not public. Compiled: each chunk alone. Linked: the r, rounded
    down, with the largest sum of the question's attention to canonical KV, over its tokens, all
    heads and all layers, the same ones in every layer. The question is what follows the last chunk;
    it is computed once to pick, and again with what was picked. Attention sinks count as any token.
    Shared: nothing, every request copies chunk KV.
    """

    name: ClassVar[str] = "prophetkv"
    summary: ClassVar[str] = "after ProphetKV-r: recompute what the question attends to most"

    r: float = option(
        0.2, "share of the chunks' tokens that is recomputed", NumberRange(0.0, 1.0), named=True
    )

    def plan_chunk(self, index: int, length: int) -> ChunkPolicy:
        """Leave the choice to the worker; no chunk is exempt."""
        selection = QuestionSelection(share=self.r)
        return ChunkPolicy(anchor=self.anchor, private=self.private, selection=selection)
