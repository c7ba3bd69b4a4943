"""Naive reuse of chunk KV: the lower bound on work and on accuracy."""

from dataclasses import dataclass
from typing import Any, ClassVar

from picbench.engines.algorithms.base import ChunkAlgorithm, NumberRange, option
from picbench.engines.planning.policy import ChunkPolicy


def temperature(default: float) -> Any:
    """The option of a temperature."""
    text = "what scores of chunks are divided by before their softmax"
    return option(default, text, NumberRange(0.1, 10.0))


@dataclass(frozen=True)
class Naive(ChunkAlgorithm):
    """Reuse chunks as they were compiled.

    Compiled: each chunk alone. Linked: nothing. Shared: all chunk blocks.
    """

    name: ClassVar[str] = "naive"
    summary: ClassVar[str] = "reuse chunks, recompute nothing inside them"

    temperature: float = temperature(1.0)

    def plan_chunk(self, index: int, length: int) -> ChunkPolicy:
        """Link nothing."""
        return ChunkPolicy(anchor=self.anchor)
