"""CacheBlend's work and memory (arXiv 2405.16444, EuroSys 2025) with a static selection."""

from dataclasses import dataclass
from math import ceil
from typing import ClassVar

from picbench.engines.algorithms.base import CopyingAlgorithm, option
from picbench.engines.planning.policy import ChunkPolicy


@dataclass(frozen=True)
class CacheBlend(CopyingAlgorithm):
    """Recompute a share r of every chunk.

    Compiled: each chunk alone. Linked: the first r of every chunk's tokens, rounded up. Shared:
    nothing, every request copies chunk KV; with ``copy=shared`` all chunk blocks that hold a token
    which is not linked.

    The paper selects the tokens whose KV deviates most, per request and after a full first layer.
    Here they are the first ones, which a missing prefix changes most (arXiv 2410.15332, section on
    attention sinks). Work and memory after the first layer are the paper's; the selection, and with
    it the accuracy, is not.
    """

    name: ClassVar[str] = "cacheblend"
    summary: ClassVar[str] = "CacheBlend-r's copies and work; static choice of tokens"

    r: float = option(
        0.15,
        "share of each chunk that is recomputed",
        (0.01, 0.05, 0.1, 0.15, 0.18, 0.2, 0.3),
        named=True,
    )

    def plan_chunk(self, index: int, length: int) -> ChunkPolicy:
        """Link the first r of the chunk; no chunk is exempt."""
        # The product has rounding errors: 0.15 * 100 must be 15, not 16.
        count = min(length, ceil(round(self.r * length, 6)))
        return ChunkPolicy(linked=range(count), anchor=self.anchor, private=self.private)
