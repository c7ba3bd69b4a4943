"""Prefix caching by vLLM: what users have without position-independent caching."""

from dataclasses import dataclass
from typing import ClassVar

from picbench.engines.algorithms.base import Algorithm, Reuse
from picbench.engines.planning.policy import ChunkPolicy


@dataclass(frozen=True)
class Prefix(Algorithm):
    """Reuse the longest prefix in common with an earlier prompt.

    Compiled: nothing. Linked: all tokens after the common prefix. Shared: the prefix's blocks.
    """

    name: ClassVar[str] = "prefix"
    summary: ClassVar[str] = "vLLM's own prefix caching"
    reuse: ClassVar[Reuse] = Reuse.PREFIX

    def plan_chunk(self, index: int, length: int) -> ChunkPolicy:
        """Link the whole chunk: all of it depends on the prefix."""
        return ChunkPolicy(linked=range(length))
