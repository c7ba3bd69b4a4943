"""Block-Attention (arXiv 2409.15355, ICLR 2025): all blocks independent but the last."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from picbench.engines.algorithms.base import Algorithm
from picbench.engines.planning.policy import ChunkPolicy, LayoutConfig, Segment


@dataclass(frozen=True)
class BlockAttention(Algorithm):
    """Compute the last block of a prompt with all others in view, which see only themselves.

    Compiled: each chunk alone, and each text between chunks. Linked: nothing. Shared: all blocks
    of these. Keys are moved to their positions in the prompt, the paper's re-encoding.

    `naive` differs in three points. There, text between chunks sees everything before it; here it
    is a block, and is reused like a chunk. There, a prompt that ends in a chunk computes that
    chunk's last token; here its last segment is the last block, so all of it is computed. The
    prompt's first text is the first block: it begins with BOS and has nothing before it, so it is
    computed as any prefix; no other block has a BOS. For prompts of a text, chunks and a question,
    which the paper and its code serve, all this is the same.

    The paper fine-tunes its models on prompts that are computed in this way; an ordinary model
    answers as badly as with `naive`.
    """

    name: ClassVar[str] = "block-attention"
    summary: ClassVar[str] = "Block-Attention: the last block sees all, others see themselves"

    def arrange(self, segments: Sequence[Segment], layout: LayoutConfig) -> Sequence[Segment]:
        """Make chunks of the texts between, and text of the last segment."""
        last = len(segments) - 1
        return [
            replace(segment, chunk=index < last and (segment.chunk or index > 0))
            for index, segment in enumerate(segments)
        ]

    def plan_chunk(self, index: int, length: int) -> ChunkPolicy:
        """Link nothing."""
        return ChunkPolicy()
