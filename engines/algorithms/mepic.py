"""MEPIC (arXiv 2512.16822): shared chunk blocks, the first block of each chunk recomputed."""

from dataclasses import dataclass
from typing import ClassVar

from picbench.engines.algorithms.base import ChunkAlgorithm, NumberRange, option
from picbench.engines.config import BLOCK_SIZE
from picbench.engines.planning.policy import ChunkPolicy, QuestionSelection


@dataclass(frozen=True)
class Mepic(ChunkAlgorithm):
    """Recompute the first block, or the first few, of every chunk.

    Compiled: each chunk alone. Linked: the first 16 tokens of every chunk, or those of the first
    ``blocks`` blocks; with an equal prefix their blocks are cache hits, as any block of text.
    Shared: all other chunk blocks.

    ``pad=paper`` is the paper's alignment of segments (section on segment alignment); by default
    pads are invisible.

    ``select=question`` is picbench's own, after the idea of ProphetKV (arXiv 2602.02579): as many
    tokens are linked, but those of the blocks that the question attends to most. The question is
    what follows the last chunk. Its attention to canonical KV is summed over its tokens, all heads
    and all layers before the request runs, and blocks are linked in the order of what each of
    their tokens has of it on average, the last one as far as the number reaches. What was computed
    for one request is not found by another, as no key covers it.
    """

    name: ClassVar[str] = "mepic"
    summary: ClassVar[str] = "MEPIC: shared chunk blocks, first block of each chunk recomputed"

    blocks: int = option(1, "blocks of each chunk that are recomputed", NumberRange(1))
    select: str = option(
        "first",
        "the first blocks of each chunk, or as many that the question attends to most",
        ("first", "question"),
    )

    def plan_chunk(self, index: int, length: int) -> ChunkPolicy:
        """Link the first blocks, or leave the choice to the worker; no chunk is exempt."""
        if self.select == "question":
            selection = QuestionSelection(self.blocks * BLOCK_SIZE)
            return ChunkPolicy(anchor=self.anchor, selection=selection)
        linked = range(min(self.blocks * BLOCK_SIZE, length))
        return ChunkPolicy(linked=linked, anchor=self.anchor)
