"""EPIC's LegoLink-k (arXiv 2410.15332, ICML 2025): recompute the first k tokens of chunks."""

from dataclasses import dataclass
from typing import ClassVar

from picbench.engines.algorithms.base import CopyingAlgorithm, option
from picbench.engines.planning.policy import Anchor, ChunkPolicy


@dataclass(frozen=True)
class Epic(CopyingAlgorithm):
    """Recompute the first k tokens of each chunk but the prompt's first.

    k = 0 recomputes nothing; chunks are then compiled behind BOS tokens that are discarded, so
    that the attention sink of each chunk falls on them (LegoLink-0).

    As published, every request copies the chunks' KV. There it overwrites the first k tokens of
    its copy; here they get slots of their own in whole blocks, and blocks that they replace as a
    whole are not copied: the same blocks for k = 16 and its multiples, at most one more a chunk
    for others.
    """

    name: ClassVar[str] = "epic"
    summary: ClassVar[str] = "EPIC LegoLink-k: recompute the first k tokens of chunks 2, 3, ..."

    k: int = option(
        16, "tokens recomputed at the start of a chunk; 0: BOS anchors", (0, 1, 2, 4, 8, 16, 32, 64)
    )

    @property
    def spec(self) -> str:
        """As in the base class, with k always named."""
        rest = super().spec.split(":")[1:]
        return ":".join(["epic", f"k={self.k}", *(o for o in rest if not o.startswith("k="))])

    @property
    def anchor(self) -> Anchor:
        """BOS tokens for k = 0, unless the prompt's first text serves as anchor."""
        if self.k == 0 and self.anchored == "off":
            return Anchor.BOS
        return super().anchor

    def plan_chunk(self, index: int, length: int) -> ChunkPolicy:
        """Link the first k tokens; the prompt's first chunk is exempt."""
        linked = range(min(self.k, length)) if index else range(0)
        return ChunkPolicy(linked=linked, anchor=self.anchor, private=self.private)
