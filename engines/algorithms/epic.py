"""EPIC's LegoLink-k (arXiv 2410.15332, ICML 2025): the first k tokens of chunks recomputed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from picbench.engines.algorithms.base import CopyingAlgorithm, NumberRange, option
from picbench.engines.planning.policy import Anchor, ChunkPolicy, LayoutConfig, Segment


@dataclass(frozen=True)
class Epic(CopyingAlgorithm):
    """Recompute the first k tokens of every chunk but the prompt's first.

    Compiled: each chunk alone; for k = 0 (LegoLink-0) after ``sinks`` BOS tokens that are then
    discarded, so that the chunk's attention sink falls on them; published are 4. Linked: the first
    k tokens of chunks 2, 3, ...; published are k = 0, 2, 4, 8, 16 and 32. Shared: nothing, every
    request copies chunk KV; with ``copy=shared`` all chunk blocks that hold a token which is not
    linked.

    With ``bos=chunk`` every chunk begins with a BOS that stays in the prompt and is the first token
    that is recomputed, as in the published code, which tokenizes chunks one by one
    (github.com/DerekHJH/epic). It takes a position and counts as a pad. For k = 0 it is one of the
    BOS that are discarded, and the option changes nothing.

    The paper overwrites the first k tokens in the request's copy. Here they get slots of their own
    in whole blocks, and blocks that they replace as a whole are not copied: the same number of
    blocks for k = 16 and its multiples, at most one more a chunk for others.
    """

    name: ClassVar[str] = "epic"
    summary: ClassVar[str] = "EPIC LegoLink-k: recompute the first k tokens of chunks 2, 3, ..."

    k: int = option(
        16, "tokens recomputed at the start of a chunk; 0: BOS anchors", NumberRange(0), named=True
    )

    bos: str = option(
        "prompt", "one BOS, as the prompt has it, or one before every chunk", ("prompt", "chunk")
    )

    #: A request may name any, and they are made before it is known that they fit no context.
    sinks: int = option(
        4, "BOS tokens that chunks are compiled after, for k=0", NumberRange(1, 4096)
    )

    def arrange(self, segments: Sequence[Segment], layout: LayoutConfig) -> Sequence[Segment]:
        """Give every chunk a BOS of its own, if it is to have one."""
        if self.bos == "prompt" or self.k == 0:
            return segments
        return [s.framed(lead=(layout.bos,)) if s.chunk else s for s in segments]

    def plan_chunk(self, index: int, length: int) -> ChunkPolicy:
        """Link the first k tokens; the prompt's first chunk is exempt."""
        linked = range(min(self.k, length)) if index else range(0)
        # After BOS tokens for k = 0, unless users name another anchor.
        bos = self.k == 0 and self.anchor == Anchor()
        anchor = Anchor(bos=self.sinks) if bos else self.anchor
        return ChunkPolicy(linked=linked, anchor=anchor, private=self.private)
