"""KVLink (arXiv 2502.16002, NeurIPS 2025): trained tokens after each chunk link the chunks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from picbench.engines.algorithms.base import ChunkAlgorithm, NumberRange, option
from picbench.engines.planning.policy import ChunkPolicy, LayoutConfig, Segment


@dataclass(frozen=True)
class KVLink(ChunkAlgorithm):
    """Compute n link tokens after every chunk, which see everything before them.

    Compiled: each chunk alone. Linked: no token of a chunk; the link tokens are computed for each
    prompt, take positions and count as pads. Shared: all chunk blocks; the blocks of link tokens
    are found again after an equal prefix. The paper has n = 0, 1 and 5.

    A link token is a token of the vocabulary whose embedding was trained. By default they are the
    ones that the model's config.json names (``link_token_ids``), the same after every chunk. With
    ``first`` they are first, first + 1, ..., numbered through all chunks of the prompt, as the
    published checkpoints have them (``first=128011``; github.com/UCSB-NLP-Chang/KVLink). Their
    marks of where documents begin and end are part of the user's text. A model without trained
    link tokens gets its pad token in their place: that costs the same, and what it answers is not
    KVLink's.
    """

    name: ClassVar[str] = "kvlink"
    summary: ClassVar[str] = "KVLink-n: n link tokens after each chunk see all before them"

    n: int = option(5, "link tokens after every chunk", NumberRange(0, 2**31 - 1), named=True)
    first: int = option(-1, "id of the first link token; -1: the model's own", NumberRange(-1))

    def arrange(self, segments: Sequence[Segment], layout: LayoutConfig) -> Sequence[Segment]:
        """Put the link tokens after every chunk."""
        if not self.n:
            return segments
        linked, chunks = list[Segment](), 0
        for segment in segments:
            linked.append(segment)
            if segment.chunk:
                linked.append(Segment(self._links(chunks, layout), lead=self.n))
                chunks += 1
        return linked

    def added(self, chunks: int) -> int:
        """The link tokens."""
        return chunks * self.n

    def plan_chunk(self, index: int, length: int) -> ChunkPolicy:
        """Link nothing."""
        return ChunkPolicy(anchor=self.anchor)

    def _links(self, chunk: int, layout: LayoutConfig) -> tuple[int, ...]:
        """The link tokens after a chunk. Raises ValueError if the model has too few of its own."""
        if self.first >= 0:
            start = self.first + chunk * self.n
            return tuple(range(start, start + self.n))
        if not layout.link_tokens:
            return (layout.pad_token,) * self.n
        if self.n > len(layout.link_tokens):
            raise ValueError(f"the model has {len(layout.link_tokens)} link tokens")
        return layout.link_tokens[: self.n]
