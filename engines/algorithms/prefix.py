"""Prefix caching by vLLM, which users have without position-independent caching; or reordered."""

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


@dataclass(frozen=True)
class Reorder(Prefix):
    """Put a prompt's chunks in an order of which prefix caching has seen most.

    The idea of ContextPilot (arXiv 2511.03475): no KV is moved, the prompt is changed instead.
    Compiled: nothing. Linked: all tokens after the common prefix. Shared: the prefix's blocks.

    Engines serve `prefix`: prompts are changed before they are sent (`picbench.run.schedule`).
    """

    name: ClassVar[str] = "reorder"
    summary: ClassVar[str] = "prefix caching of prompts whose chunks are put in another order"
    reorders: ClassVar[bool] = True

    @property
    def served(self) -> str:
        """Prefix caching."""
        return Prefix.name
